"""Sends the same prompts alone and in a batch to a running server, and compares their logprobs bit for bit.

The requests test a server that claims batch invariance; `checks/batch_invariance.py` judges the result.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..adapters import Endpoint
from ..settings import DOCUMENTED

MOST_PROBES = 8
LONGEST_ANSWER = 32
TOP_LOGPROBS = 5
"""How many alternatives are requested at each token; their logprobs are compared as well."""
COMPANIES = 3
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that differs from the answer that the prompt got alone."""

    __pydantic_config__ = DOCUMENTED

    company: str
    """The other requests in the batch, in a few words."""
    request: int
    """The index of the prompt, counted from 0."""
    prompt_tokens: int
    token: int
    """The index of the token in the answer, counted from 0."""
    alone: str
    """The token of the answer alone, as the server gave it: text, logprob, alternatives."""
    together: str


@dataclass(frozen=True)
class CompanyFigures:
    """How many answers differ between prompts sent alone and in a batch."""

    __pydantic_config__ = DOCUMENTED

    claim: str
    """The batch invariance that the server claims: `pin` or `per-token`."""
    requests: int
    """Number of prompts that were sent alone, and once with every kind of neighbours."""
    neighbours: int
    """The most other requests in a batch."""
    tokens: int
    """Number of compared tokens, each with its logprob and its alternatives' logprobs."""
    failed: int
    """Number of requests without an answer."""
    differing: int
    """Number of answers in a batch that differ from the answer alone."""
    first: Difference | None = None


@dataclass(frozen=True)
class _Probe:
    """One request; every second request samples, with its own seed."""

    prompt: tuple[int, ...]
    answer_len: int
    seed: int | None


Answer = list[tuple[Any, ...]] | None
"""For each token its text, logprob and alternatives; None if the request failed."""


def compare_in_company(
    endpoint: Endpoint, claim: str, text: Sequence[int], most: int, input_len: int, output_len: int
) -> CompanyFigures:
    """Send prompts of up to `input_len` tokens of `text` one at a time, then in batches of at most `most`.

    A batch holds all prompts; the second also holds shorter requests, the third longer ones.
    """
    answer_len = min(LONGEST_ANSWER, output_len)
    count = max(1, min(MOST_PROBES, most // 2))
    probes = []
    for index in range(count):
        prompt = _slice(text, index, 1 + input_len * (index + 1) // (count + 1))
        probes.append(_Probe(prompt, answer_len, index if index % 2 else None))
    others = most - count
    shorter = [_Probe(_slice(text, 100 + index, 1), answer_len, None) for index in range(others)]
    longer = [_Probe(_slice(text, 200 + index, input_len), output_len, None) for index in range(others)]
    companies: list[tuple[str, list[_Probe]]] = [
        ("the other prompts", []),
        (f"{others} shorter ones", shorter),
        (f"{others} longer ones", longer),
    ]
    alone = [_ask(endpoint, probe) for probe in probes]
    failed, tokens, differing, first = sum(answer is None for answer in alone), 0, 0, None
    for company, neighbours in companies:
        # Half of the neighbours go first, so that the prompts get other places in the batch than alone.
        ahead = neighbours[: len(neighbours) // 2]
        sent = [*ahead, *probes, *neighbours[len(ahead) :]]
        with ThreadPoolExecutor(max_workers=len(sent)) as pool:
            together = list(pool.map(lambda probe: _ask(endpoint, probe), sent))
        found = together[len(ahead) : len(ahead) + count]
        failed += sum(answer is None for answer in together)
        for index, (expected, got) in enumerate(zip(alone, found, strict=True)):
            if expected is None or got is None:
                continue
            tokens += len(expected)
            at = _first_difference(expected, got)
            if at is not None:
                differing += 1
                said = [repr(answer[at]) if at < len(answer) else "nothing" for answer in (expected, got)]
                first = first or Difference(company, index, len(probes[index].prompt), at, *said)
    return CompanyFigures(claim, count, others, tokens, failed, differing, first)


def _slice(text: Sequence[int], index: int, length: int) -> tuple[int, ...]:
    """Return a different part of the text for every index."""
    start = index * 977 % max(1, len(text) - length)
    return tuple(text[start : start + length])


def _first_difference(alone: list, together: list) -> int | None:
    """Return the first place where two answers are not equal, logprobs to the last digit."""
    if alone == together:
        return None
    pairs = zip(alone, together, strict=False)
    return next(
        (at for at, (token, other) in enumerate(pairs) if token != other), min(len(alone), len(together))
    )


def _ask(endpoint: Endpoint, probe: _Probe) -> Answer:
    """Return the answer's tokens as the JSON holds them, in which every float has enough digits to be
    exact.
    """
    body = {
        "prompt": list(probe.prompt),
        "max_tokens": probe.answer_len,
        "logprobs": TOP_LOGPROBS,
        "temperature": 0.0 if probe.seed is None else 1.0,
        **({} if probe.seed is None else {"seed": probe.seed}),
    }
    choice = endpoint.complete(body, TIMEOUT_S)
    try:
        said = (choice or {})["logprobs"]
        return list(zip(said["tokens"], said["token_logprobs"], said["top_logprobs"], strict=True))
    except (ValueError, KeyError, TypeError):
        return None
