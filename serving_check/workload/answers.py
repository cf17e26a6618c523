"""What one stream said, read from its events once the clock has stopped: its text, and its tokens where told.

Not for timing: the generator notes when each event came, and parses none of them while it measures.
"""

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """The content of one stream."""

    text: str
    token_ids: "array[int] | None"
    """As the server told them beside the text; None where it does not."""
    finish_reason: str | None = None
    logprobs: tuple[float | None, ...] | None = None
    """Of the chosen tokens; None where the server tells none."""
    prompt_token_ids: tuple[int, ...] | None = None
    """What the server made of a chat; None where it does not tell."""
    is_parsed: bool = False
    """Whether the server took some of the text out: reasoning, or calls of tools."""


def read_answer(events: Iterable[bytes]) -> Answer:
    """The first choice of every `data: {...}` event, put together; what is no such event is left out."""
    texts: list[str] = []
    token_ids = array("L")
    told = False
    for event in events:
        try:
            choice = json.loads(event.partition(b"data:")[2])["choices"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            continue
        texts.append(choice.get("text") or "")
        if (ids := choice.get("token_ids")) is not None:
            told = True
            token_ids.extend(ids)
    return Answer("".join(texts), token_ids if told else None)
