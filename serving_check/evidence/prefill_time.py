"""The prefill time under one load: the time in which some request had no token yet."""

import math
from collections.abc import Sequence

from ..workload import RequestRecord


def prefill_seconds(records: Sequence[RequestRecord]) -> float | None:
    """Return the seconds in which at least one request had been sent and had no token yet; None if no request
    got a token.

    Others may decode meanwhile.
    """
    return math.fsum(end - begin for begin, end in prefill_times(records)) or None


def prefill_times(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """Yield the times in which some request had no token yet, as (begin, end), in order and without
    overlap.
    """
    waits = sorted(
        (record.start, record.start + record.ttft)
        for record in records
        if record.error is None and record.ttft is not None
    )
    found: list[tuple[float, float]] = []
    for begin, end in waits:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
