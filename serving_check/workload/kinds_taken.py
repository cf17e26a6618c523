"""Finds out which kinds of requests a server accepts, by one short request of each before any load.

A field that a server refuses is not judged; a field that it accepts and ignores is.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..adapters.endpoint import DIRECT, PROBE_S, REFUSALS, Endpoint
from .open_loop import body_of
from .planned_request import WHOLE, Adjustments, Kind, PlannedRequest, Truncation
from .use_plan import IN_CHATS

NO_ROUTE = 404, 405, 501
PROMPT = (1, 2, 3, 4)
GREETING = (("user", "Hello"),)
HEEDED_PENALTY = 2.0
"""The most that servers take: it halves the logit of a token that is likely to come again."""
HEEDED_PROMPTS = 12
"""Prompts of which the first token after some was in the prompt, if that is so at one in three."""
HEEDED_TOKENS = 16
"""Tokens that are drawn alike twice only with one seed."""
FIELDS: dict[Kind, str] = {
    "sampled": "seed, top_k or min_p",
    "chat": "chat requests",
    "stop": "stop strings",
    "end": "logit_bias or min_tokens",
    "logprobs": "logprobs",
    "choices": "n with seed, top_k or min_p",
    "truncated": "top_k, top_p or min_p",
    "adjusted": "presence_penalty, frequency_penalty or logit_bias",
    "repetition": "repetition_penalty",
}
"""For each kind of request, the field or route that a server does not support if it refuses the kind."""


@dataclass(frozen=True)
class AcceptedKinds:
    """The kinds of requests that one server accepts, and a few words for each kind that it refuses."""

    kinds: frozenset[Kind]
    unknown: tuple[str, ...]
    in_chats: frozenset[Kind] = frozenset()
    """The kinds that it accepts in chats as well."""

    def without(self, kind: Kind, why: str) -> "AcceptedKinds":
        return AcceptedKinds(self.kinds - {kind}, (*self.unknown, why), self.in_chats - {kind})


def kinds_taken(endpoint: Endpoint, end_token: int | None, has_template: bool) -> AcceptedKinds:
    """Ask for each kind once, and once more in a chat.

    end_token: the model's end-of-sequence token. has_template: whether its tokenizer has a chat template
    """
    kinds: set[Kind] = {"greedy", "aborted"}
    unknown: list[str] = []
    for kind, fields in FIELDS.items():
        if kind == "end" and end_token is None:
            unknown.append("the model has no end-of-sequence token")
        elif kind == "chat" and not has_template:
            unknown.append("the tokenizer has no chat template for plain conversations")
        elif _is_refused(endpoint, _probe(kind, end_token)):
            unknown.append(f"the server does not take {fields}")
        else:
            kinds.add(kind)
    in_chats: set[Kind] = set()
    for kind in IN_CHATS if "chat" in kinds else ():
        if kind in kinds and _is_refused(endpoint, replace(_probe(kind, end_token), messages=GREETING)):
            unknown.append(f"the server does not take {FIELDS[kind]} in chats")
        elif kind in kinds:
            in_chats.add(kind)
    return AcceptedKinds(frozenset(kinds), tuple(unknown), frozenset(in_chats))


def heeds_repetition_penalty(endpoint: Endpoint, prompts: Sequence[Sequence[int]]) -> bool:
    """Return whether the first token of an answer changes with a repetition penalty.

    Many servers ignore unknown fields, and SGLang penalizes only the answer's own tokens.
    """

    def first_token(prompt: Sequence[int], penalty: float) -> str | None:
        body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        choice = endpoint.complete({**body, "repetition_penalty": penalty}, PROBE_S)
        return None if choice is None else choice.get("text")

    pairs = [(first_token(prompt, 1.0), prompt) for prompt in prompts[:HEEDED_PROMPTS]]
    return any(plain is None or first_token(prompt, HEEDED_PENALTY) != plain for plain, prompt in pairs)


def draws_choices_apart(endpoint: Endpoint, prompt: Sequence[int]) -> bool:
    """Return whether the choices of a request with a seed differ: some engines draw all with that seed."""
    body = {"prompt": list(prompt), "max_tokens": HEEDED_TOKENS, "temperature": 1.0, "ignore_eos": True}
    choices = endpoint.complete_all({**body, "n": 2, "seed": 1}, PROBE_S)
    return not choices or len(choices) < 2 or choices[0].get("text") != choices[1].get("text")


def _probe(kind: Kind, end_token: int | None) -> PlannedRequest:
    """Return a request of that kind with a short answer."""
    return PlannedRequest(
        at=0.0,
        kind=kind,
        prompt=PROMPT,
        output_len=2,
        messages=GREETING if kind == "chat" else (),
        temperature=1.0 if kind in ("sampled", "choices", "truncated") else 0.0,
        seed=1,
        stop="stop",
        end_token=end_token,
        min_tokens=1,
        choices=2 if kind == "choices" else 1,
        truncation=Truncation(2, 0.5, 0.3) if kind == "truncated" else WHOLE,
        adjustments=Adjustments(1.0, 1.0, ((1, 1.0),), 1.1) if kind in ("adjusted", "repetition") else None,
    )


def _is_refused(endpoint: Endpoint, probe: PlannedRequest) -> bool:
    """Say whether the server does not know the field or route. Other failures are left to the load."""
    headers = {"Content-Type": "application/json", **endpoint.headers()}
    body = json.dumps(body_of(endpoint, probe)).encode()
    request = urllib.request.Request(endpoint.base_url + probe.route, body, headers)
    try:
        with DIRECT.open(request, timeout=PROBE_S) as response:
            response.read()
    except urllib.error.HTTPError as error:
        return error.code in (*REFUSALS, *NO_ROUTE)
    except (OSError, http.client.HTTPException):
        return False
    return False
