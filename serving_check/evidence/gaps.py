"""The gaps of one repeat in which a server sent nothing to any client.

A slow request alone is no gap: in a gap no stream moves at all. `checks/stalls.py` decides which gap is a
stall.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..settings import DOCUMENTED
from ..workload import WorkloadResult

DIGITS = 4


@dataclass(frozen=True)
class Gap:
    """The time between two consecutive events of all streams, while requests were open."""

    __pydantic_config__ = DOCUMENTED

    at: float
    """Seconds since the repeat began."""
    seconds: float


@dataclass(frozen=True)
class LongestGaps:
    """The longest gaps of one repeat."""

    __pydantic_config__ = DOCUMENTED

    filling: Gap
    """The longest gap during prefill, that is, while some request had no token yet."""
    decoding: Gap
    """The longest gap while every request had a token."""


NO_GAPS = LongestGaps(Gap(0.0, 0.0), Gap(0.0, 0.0))


def longest_gaps(result: WorkloadResult) -> LongestGaps:
    longest = {True: NO_GAPS.filling, False: NO_GAPS.decoding}
    for gap, in_prefill in _gaps(result):
        if gap.seconds > longest[in_prefill].seconds:
            longest[in_prefill] = gap
    return LongestGaps(longest[True], longest[False])


def _gaps(result: WorkloadResult) -> Iterator[tuple[Gap, bool]]:
    """Yield every gap, and whether it lies within prefill."""
    moments: list[float] = []
    prefill_end = 0.0
    for record in result.requests:
        moments += [record.start, *record.arrivals, record.start + record.e2el]
        prefill_end = max(prefill_end, record.start + (record.ttft or record.e2el))
    for earlier, later in pairwise(sorted(moments)):
        yield Gap(round(earlier, DIGITS), round(later - earlier, DIGITS)), later <= prefill_end
