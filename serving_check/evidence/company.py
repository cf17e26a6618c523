"""The same prompts alone and among others on a running server, their logprobs compared bit for bit.

What a server that claims batch invariance is held to. Not for judging it (`checks/batch_invariance.py`).
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
"""Alternatives at each token, whose logprobs are compared as well."""
COMPANIES = 3
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt's answer that came out other than alone."""

    __pydantic_config__ = DOCUMENTED

    company: str
    """Who shared the batch."""
    request: int
    """Which of the prompts, counted from 0."""
    prompt_tokens: int
    token: int
    """Which token of the answer, counted from 0."""
    alone: str
    """What was said of it: text, logprob, alternatives."""
    together: str


@dataclass(frozen=True)
class CompanyFigures:
    """What prompts got alone and in company."""

    __pydantic_config__ = DOCUMENTED

    claim: str
    """`pin` or `per-token`."""
    requests: int
    """Prompts that were sent alone and in every company."""
    neighbours: int
    """Requests that came with them, at most."""
    tokens: int
    """Tokens compared, each with its logprob and its alternatives'."""
    failed: int
    """Requests without an answer."""
    differing: int
    """Answers in company that are not the one alone."""
    first: Difference | None = None


@dataclass(frozen=True)
class _Probe:
    """One request; every other one draws its tokens, by a seed of its own."""

    prompt: tuple[int, ...]
    answer_len: int
    seed: int | None


Answer = list[tuple[Any, ...]] | None
"""For each token its text, logprob and alternatives; None where the request failed."""


def compare_in_company(
    endpoint: Endpoint, claim: str, text: Sequence[int], most: int, input_len: int, output_len: int
) -> CompanyFigures:
    """Send prompts of up to `input_len` tokens of `text` one at a time, then beside others, `most` at once.

    The other prompts are beside them, then shorter requests besides, then longer ones.
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
        # Half of them go ahead, so that places in the batch are others than alone.
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
    """Another part of the text for every index."""
    start = index * 977 % max(1, len(text) - length)
    return tuple(text[start : start + length])


def _first_difference(alone: list, together: list) -> int | None:
    """The first place where two answers are not equal, logprobs to the last digit."""
    if alone == together:
        return None
    pairs = zip(alone, together, strict=False)
    return next(
        (at for at, (token, other) in enumerate(pairs) if token != other), min(len(alone), len(together))
    )


def _ask(endpoint: Endpoint, probe: _Probe) -> Answer:
    """Its tokens as JSON has them, where every float has the digits that tell it from its neighbours."""
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
