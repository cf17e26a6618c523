"""Finds out which kinds of requests a server accepts, by one short request of each before any load.

A field that a server refuses is not judged; a field that it accepts and ignores is.
"""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass

from ..adapters.endpoint import DIRECT, PROBE_S, REFUSALS, Endpoint
from .open_loop import body_of
from .use_plan import Adjustments, Kind, PlannedRequest

NO_ROUTE = 404, 405, 501
PROMPT = (1, 2, 3, 4)
FIELDS: dict[Kind, str] = {
    "sampled": "seed, top_k or min_p",
    "chat": "chat requests",
    "stop": "stop strings",
    "end": "logit_bias or min_tokens",
    "logprobs": "logprobs",
    "choices": "n with seed, top_k or min_p",
    "adjusted": "presence_penalty, frequency_penalty or logit_bias",
}
"""For each kind of request, the field or route that a server does not support if it refuses the kind."""


@dataclass(frozen=True)
class AcceptedKinds:
    """The kinds of requests that one server accepts, and a few words for each kind that it refuses."""

    kinds: frozenset[Kind]
    unknown: tuple[str, ...]


def kinds_taken(endpoint: Endpoint, end_token: int | None, has_template: bool) -> AcceptedKinds:
    """Ask for each kind once.

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
    return AcceptedKinds(frozenset(kinds), tuple(unknown))


def _probe(kind: Kind, end_token: int | None) -> PlannedRequest:
    """Return a request of that kind with a short answer."""
    return PlannedRequest(
        at=0.0,
        kind=kind,
        prompt=PROMPT,
        output_len=2,
        messages=(("user", "Hello"),) if kind == "chat" else (),
        temperature=1.0 if kind in ("sampled", "choices") else 0.0,
        seed=1,
        stop="stop",
        end_token=end_token,
        min_tokens=1,
        choices=2 if kind == "choices" else 1,
        adjustments=Adjustments(1.0, 1.0, ((1, 1.0),)) if kind == "adjusted" else None,
    )


def _is_refused(endpoint: Endpoint, probe: PlannedRequest) -> bool:
    """Say whether the server knows no such field or route. Any other failure is left for the load to show."""
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
