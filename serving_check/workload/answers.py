"""The content of one answer, read from its events after the clock has stopped: its text, and its tokens if
the server reports them. An answer that was not streamed is one event.

The generator does the timing: it notes when each event arrived, and parses no event while it measures.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Alternatives:
    """The most likely tokens in the place of one token, as the server told them."""

    chosen: str | None
    """The text of the chosen token; None if the server does not tell it."""
    logprobs: Mapping[str, float]
    """Of each, by its text: those with the same text are one."""


@dataclass(frozen=True)
class Answer:
    """One answer."""

    text: str
    token_ids: "array[int] | None"
    """The token ids that the server reported beside the text; None if it reports none."""
    finish_reason: str | None = None
    logprobs: tuple[float | None, ...] | None = None
    """The log-probabilities of the chosen tokens; None if the server reports none."""
    alternatives: tuple["Alternatives", ...] | None = None
    """The most likely tokens in the place of each token; None if the server reports none."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The token ids of a chat's prompt; None if the server does not report them."""
    is_parsed: bool = False
    """Whether the server moved some of the text to other fields: reasoning, or calls of tools."""
    model: str | None = None
    """The name of the model, as the server told it."""


def read_answer(events: Iterable[bytes], index: int = 0) -> Answer:
    """Return the choice with that index of every `data: {...}` event, joined; other events are left out."""
    texts: list[str] = []
    token_ids: array[int] | None = None
    finish_reason: str | None = None
    logprobs: list[float | None] | None = None
    alternatives: list[Alternatives] | None = None
    prompt: tuple[int, ...] | None = None
    is_parsed, model = False, None
    for event, choice in _choices(events, index):
        delta = choice.get("delta") or choice.get("message") or {}
        model = event.get("model", model)
        texts.append(choice.get("text") or delta.get("content") or "")
        is_parsed = is_parsed or any(delta.get(name) for name in PARSED)
        if (ids := choice.get("token_ids")) is not None:
            token_ids = token_ids or array("L")
            token_ids.extend(ids)
        finish_reason = choice.get("finish_reason") or finish_reason
        told = choice.get("logprobs") or {}
        if (of_chosen := told.get("token_logprobs")) is not None:
            logprobs = [*(logprobs or ()), *of_chosen]
        if (of_chat := told.get("content")) is not None:
            logprobs = [*(logprobs or ()), *(token.get("logprob") for token in of_chat)]
            alternatives = [*(alternatives or ()), *map(_of_chat, of_chat)]
        if (tops := told.get("top_logprobs")) is not None:
            texts_told = told.get("tokens") or [None] * len(tops)
            pairs = zip(texts_told, tops, strict=False)
            alternatives = [*(alternatives or ()), *(Alternatives(text, top or {}) for text, top in pairs)]
        # vLLM has it beside the choice of a chat, and in that of a completion.
        if (ids := event.get("prompt_token_ids") or choice.get("prompt_token_ids")) is not None:
            prompt = tuple(ids)
    return Answer(
        text="".join(texts),
        token_ids=token_ids,
        finish_reason=finish_reason,
        logprobs=None if logprobs is None else tuple(logprobs),
        alternatives=None if alternatives is None else tuple(alternatives),
        prompt_token_ids=prompt,
        is_parsed=is_parsed,
        model=model,
    )


def _of_chat(token: dict[str, Any]) -> Alternatives:
    """Return the alternatives to one token of a chat."""
    told = token.get("top_logprobs") or ()
    return Alternatives(
        token.get("token"), {alternative.get("token"): alternative.get("logprob") for alternative in told}
    )


@dataclass(frozen=True)
class Envelope:
    """The fields of an answer besides the text of its choices: for each field, all its different values."""

    ids: tuple[str | None, ...]
    objects: tuple[str | None, ...]
    created: tuple[int | None, ...]
    """Seconds since 1970; None if an event has no whole number there."""
    indexes: tuple[int | None, ...]
    """The indexes of the choices."""
    roles: tuple[str | None, ...]
    """The role in the first part of each choice of a chat; None if it has none."""


def read_envelope(events: Iterable[bytes]) -> Envelope:
    """Yield the fields of all `data: {...}` events; events that are no JSON object are left out."""
    ids: dict[str | None, None] = {}
    objects: dict[str | None, None] = {}
    created: dict[int | None, None] = {}
    roles: dict[int | None, str | None] = {}
    for event in events:
        try:
            parsed = json.loads(event.partition(b"data:")[2])
            choices = [choice for choice in parsed["choices"] if isinstance(choice, dict)]
        except (ValueError, KeyError, TypeError):
            continue
        ids.setdefault(_of_type(str, parsed.get("id")))
        objects.setdefault(_of_type(str, parsed.get("object")))
        created.setdefault(_of_type(int, parsed.get("created")))
        for choice in choices:
            delta = choice.get("delta") or choice.get("message") or {}
            roles.setdefault(_of_type(int, choice.get("index")), _of_type(str, delta.get("role")))
    return Envelope(tuple(ids), tuple(objects), tuple(created), tuple(roles), tuple(roles.values()))


PARSED = ("reasoning", "reasoning_content", "tool_calls")
"""Parts of a chat's delta besides its content."""


def _of_type(kind: type[T], value: object) -> T | None:
    return value if type(value) is kind else None


def _choices(events: Iterable[bytes], index: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield every event that has this choice, and the choice."""
    for event in events:
        try:
            parsed = json.loads(event.partition(b"data:")[2])
            choices = [choice for choice in parsed["choices"] if choice.get("index", 0) == index]
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        for choice in choices:
            yield parsed, choice
