"""Which requests of a load as in use are slow although most are not: requests of one kind, or with long
prompts.

A median over all requests hides slow groups. What all requests share is judged in `speed.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ...evidence.in_use import BlockInUse

ERROR = 0.02
"""The chance that a group whose median ratio is exactly the bound fails. A sound server fails only if, by
chance, all of six requests, or nearly all of a larger group, take so much longer. If one request in five
does, one in 15,000 groups fails."""
SHORTEST = 64
"""Tokens. Prompts longer than this are compared as a group, then those longer than twice this, and so on."""
KINDS = {
    "greedy": "greedy completions",
    "sampled": "sampled requests",
    "chat": "chats",
    "stop": "requests with stop strings",
    "end": "requests that end by the end-of-sequence token",
    "logprobs": "requests with log-probabilities",
    "choices": "requests for several answers",
    "adjusted": "requests with penalties and a bias",
    "repetition": "requests with a repetition penalty",
    "truncated": "requests with top-k, top-p or min-p",
    "unstreamed": "requests that are not streamed",
}


@dataclass(frozen=True)
class _Request:
    """A request that both sides answered."""

    kind: str
    prompt_tokens: int
    ratio: float
    """The ratio of a latency, artifact over baseline."""


@dataclass(frozen=True)
class SlowGroup:
    name: str
    ratio: float
    """The median ratio of the group's requests."""


def slow_groups(blocks: Sequence[BlockInUse], figure: str, allowance: float, most: float) -> list[SlowGroup]:
    """Return the groups whose median ratio is surely above `most`: all kinds, and the shortest of long
    prompts.

    figure:    `ttfts` or `tpots`
    allowance: seconds, added to both sides before dividing
    """
    requests = list(_requests(blocks, figure, allowance))
    found = [
        SlowGroup(words, median(ratios))
        for kind, words in KINDS.items()
        if _is_slow(ratios := _of(requests, _is_of_kind(kind)), most)
    ]
    longest = max((request.prompt_tokens for request in requests), default=0)
    for tokens in (SHORTEST << power for power in range(max(0, (longest // SHORTEST).bit_length()))):
        if _is_slow(ratios := _of(requests, _is_longer_than(tokens)), most):
            return [
                *found,
                SlowGroup(f"requests with prompts of more than {tokens:,} tokens", median(ratios)),
            ]
    return found


def _requests(blocks: Sequence[BlockInUse], figure: str, allowance: float) -> Iterator[_Request]:
    for block in blocks:
        if block.artifact is None or block.baseline is None or not block.kinds:
            continue
        ours, theirs = getattr(block.artifact, figure), getattr(block.baseline, figure)
        for kind, tokens, our, their in zip(block.kinds, block.prompt_tokens, ours, theirs, strict=True):
            if our is not None and their:
                yield _Request(kind, tokens, (our + allowance) / (their + allowance))


def _of(requests: Sequence[_Request], holds: Callable[[_Request], bool]) -> list[float]:
    return sorted(request.ratio for request in requests if holds(request))


def _is_of_kind(kind: str) -> Callable[[_Request], bool]:
    return lambda request: kind in request.kind.split()


def _is_longer_than(tokens: int) -> Callable[[_Request], bool]:
    return lambda request: request.prompt_tokens > tokens


def _is_slow(ratios: Sequence[float], most: float) -> bool:
    """Say whether the lower limit of the requests' median is above `most`: an order statistic of the ratios,
    which are sorted already.
    """
    rank = lower_rank(len(ratios))
    return rank is not None and ratios[rank] > most


def lower_rank(count: int) -> int | None:
    """Return the index of a lower limit for the true median of `count` sorted values: the largest value that
    is above the true median with a chance of at most `ERROR`; None if even the lowest value has a larger
    chance. The number of values below the median is binomial (Thompson, 1936)."""
    chance, rank = 0.0, None
    for index in range(count):
        chance += math.comb(count, index) / 2**count
        if chance > ERROR:
            break
        rank = index
    return rank
