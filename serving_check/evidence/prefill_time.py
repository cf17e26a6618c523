"""The prefill time of one repeat: the time in which some request had no token yet."""

from ..workload import WorkloadResult


def prefill_seconds(result: WorkloadResult) -> float | None:
    """Seconds in which at least one request had been sent and had no token yet; None if none got one.

    Others may decode meanwhile.
    """
    waits = sorted(
        (record.start, record.start + record.ttft)
        for record in result.requests
        if record.error is None and record.ttft is not None
    )
    seconds, until = 0.0, float("-inf")
    for begin, end in waits:
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds or None
