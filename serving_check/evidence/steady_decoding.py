"""How fast a server decodes while all M requests decode, outside prefill.

With long prompts, prefill takes most of a repeat, and a decode step could take twice as long unnoticed. Not
for whole requests, whose throughput is `Repeat.output_throughput`.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from ..workload import WorkloadResult

LEAST_TOKENS = 8
"""Of each request, in the parts of a repeat that count: fewer say little."""


def steady_decoding(result: WorkloadResult) -> float | None:
    """Output tokens per second in the parts of a repeat in which M streams are open, from the last one's
    first chunk to the end of the first that ends; None where those parts are too short.

    Contexts are never shorter there than the prompts, and a chunk that holds several tokens counts as many.
    """
    streams = [record for record in result.requests if record.error is None and record.itls]
    arrivals = [record.arrivals for record in streams]
    seconds = tokens = 0.0
    for begin, end in _all_open(arrivals, result.spec.m):
        seconds += end - begin
        for record, stamps in zip(streams, arrivals, strict=True):
            chunks = bisect_right(stamps, end) - bisect_right(stamps, begin)
            tokens += chunks * (record.output_tokens - 1) / len(record.itls)
    if seconds <= 0 or tokens < LEAST_TOKENS * result.spec.m:
        return None
    return tokens / seconds


def _all_open(arrivals: Sequence[Sequence[float]], m: int) -> Iterator[tuple[float, float]]:
    """The times during which `m` streams are between their first and their last chunk."""
    changes = [(stamps[0], 1) for stamps in arrivals] + [(stamps[-1], -1) for stamps in arrivals]
    opened, then = 0, 0.0
    for now, change in sorted(changes):
        if opened == m and now > then:
            yield then, now
        opened, then = opened + change, now
