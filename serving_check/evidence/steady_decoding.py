"""How fast a server decodes while it reads no prompt.

With long prompts, prefill takes most of a repeat, and a decode step could take twice as long without being
noticed. The throughput of whole requests is `Repeat.output_throughput`.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..workload import RequestRecord, WorkloadResult

LEAST_TOKENS = 8
"""The least number of tokens for each of M requests in the parts of a repeat that count."""


@dataclass(frozen=True)
class _Part:
    """A time in which the number of open streams does not change."""

    begin: float
    end: float
    streams: int


def steady_decoding(result: WorkloadResult) -> float | None:
    """Return output tokens per second of M streams, from the parts of a repeat in which more than half of M
    streams are open and no request waits for its first token; None if these parts are too short.

    If fewer than M streams are open, the result is M times the speed of one stream. If prompts are long, the
    first answers end soon after the last prompt, so all M streams may be open for a few steps only. While the
    parts last, contexts are at least as long as the prompts. A chunk that holds several tokens counts as
    several.
    """
    streams = [record for record in result.requests if record.error is None and record.itls]
    arrivals = [record.arrivals for record in streams]
    stream_seconds = tokens = 0.0
    for part in _steady_parts(streams, arrivals, result.spec.m):
        stream_seconds += part.streams * (part.end - part.begin)
        for record, stamps in zip(streams, arrivals, strict=True):
            chunks = bisect_right(stamps, part.end) - bisect_right(stamps, part.begin)
            tokens += chunks * (record.output_tokens - 1) / len(record.itls)
    if stream_seconds <= 0 or tokens < LEAST_TOKENS * result.spec.m:
        return None
    return tokens * result.spec.m / stream_seconds


def _steady_parts(
    streams: Sequence[RequestRecord], arrivals: Sequence[Sequence[float]], m: int
) -> Iterator[_Part]:
    # Streams opened, and requests that begin to wait, at each moment.
    changes = [(stamps[0], 1, -1) for stamps in arrivals] + [(stamps[-1], -1, 0) for stamps in arrivals]
    changes += [(record.start, 0, 1) for record in streams]
    opened = waiting = 0
    then = 0.0
    for now, more_open, more_waiting in sorted(changes):
        if not waiting and 2 * opened > m and now > then:
            yield _Part(then, now, opened)
        opened, waiting, then = opened + more_open, waiting + more_waiting, now
