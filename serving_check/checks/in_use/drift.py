"""Whether the artifact's server becomes slower the more requests it has served.

Two figures show this: the parts of a burst of tiny requests, and the first M at the end against its first
repeats. The baseline's server, if it is up, becomes slower with the machine, so both figures are relative to
it. But a machine need not slow both servers alike: contention for memory slows a baseline in bfloat16 more
than an artifact in INT4. A server whose own speed is what it was is therefore not slower, whatever the
baseline's does.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from ...evidence.at_rest import PARTS_BEFORE, AtRestFigures, BurstPart
from ...evidence.verdict import CheckResult, CheckStatus
from ...statistics.rank_shift import least_shift, shift

NAME = "drift"
MOST_SLOWER = 1.1
"""How many times as long the first M may take at the end, relative to the baseline.

If repeats scatter by 6% and the machine's speed changes by 12%, all of 2,000 simulated sound servers pass. A
server that takes 1.3 times as long fails in 81% and passes in 7%; one that takes 1.5 times as long fails in
98% and passes in 0.3% (`tests/bench/results/gate/drift_characteristic.json`).
"""
MOST_SLOWER_BURST = 1.3
"""How many times as long later parts of the burst may take, relative to the baseline.

In the same simulation a server that takes 1.5 times as long fails in 87% of looks, one that takes twice as
long in 99.9%, and a sound one in none.
"""
MOST_SLOWER_ALONE = 1.5
"""Either bound if no baseline tells how much slower the machine became.

Between the beginning and the end of a dozen runs on two shared cores, speed moved by up to 1.5 times.
"""
ERROR = 0.01
"""One-sided level of the confidence limit that must be above the bound for a fail at the first M."""
UNSURE = 0.15
"""Above this chance that the first M is not slower at all, the machine is taken to be the cause."""
SEEN = 3000
"""The number of requests from which on a pass does not mention how many were sent."""
LEAST_PARTS = 2
"""The least number of parts of the burst before and after a step: the machine may make one part slow."""


def check_drift(figures: AtRestFigures) -> CheckResult:
    """Fail if all later parts of the burst were slower than all earlier ones, by more than the bound, or if
    the first M was surely slower at the end than at first. The check is inconclusive if the first M may have
    been slower.
    """
    relative = bool(figures.baseline_first and figures.baseline_last)
    step, part = _step(figures.burst, figures.baseline_burst)
    slower, least, least_likely = _first_m_again(figures)
    most_step = _most_step(figures.baseline_burst)
    most = MOST_SLOWER if relative else MOST_SLOWER_ALONE
    has_step = step > most_step
    may_be_slower = slower is not None and slower > most and least_likely > 1
    is_slower = least is not None and least > most
    status: CheckStatus = "pass"
    reason = f"the server is as fast at the end as at first, {figures.requests:,} requests later"
    if figures.requests < SEEN:
        reason += (
            "; what begins after more is not known, so validate on a quieter or faster machine to see it"
        )
    if slower is None and len(figures.burst) < 2 * LEAST_PARTS:
        status, reason = "unknown", "requests failed before anything could be compared"
    elif has_step or is_slower:
        status = "fail"
    elif may_be_slower:
        status = "inconclusive"
    problems = [
        *([_of_step(figures, step, part)] if has_step else []),
        *([_of_first_m(figures, slower, is_slower)] if slower is not None and may_be_slower else []),
    ]
    requests = sum(tiny.requests for tiny in figures.burst)
    again = "not measured again" if slower is None else f"takes {slower:.2f}× as long at the end"
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"M={figures.first_m} {again}, {step:.2f}× in later parts of {requests:,} tiny requests",
        bound=f"at most {most:g}× as long at the end, {most_step:g}× in later parts"
        + (", relative to the baseline" if relative else ""),
        reason="; ".join(problems) or reason,
        figures={
            "first_m_slower": slower,
            "first_m_slower_at_least": least,
            "burst_slower": step,
            "burst_requests": requests,
        },
    )


def shows_step(burst: Sequence[BurstPart], baseline_burst: Sequence[BurstPart]) -> bool:
    """Say whether requests take longer from some part of the burst on, by more than the bound."""
    return _step(burst, baseline_burst)[0] > _most_step(baseline_burst)


def _most_step(baseline_burst: Sequence[BurstPart]) -> float:
    return MOST_SLOWER_BURST if baseline_burst else MOST_SLOWER_ALONE


def _of_step(figures: AtRestFigures, step: float, part: int) -> str:
    before = sum(tiny.requests for tiny in figures.burst[:part])
    if part >= PARTS_BEFORE:
        before += figures.between
    return (
        f"tiny requests take {step:.2f}× as long from about the {before:,}th of the burst on "
        f"({_rate(figures.burst[:part])} before, {_rate(figures.burst[part:])} after): something grows with "
        "every request and is searched or copied, or a pool runs out after so many"
    )


def _of_first_m(figures: AtRestFigures, slower: float, is_sure: bool) -> str:
    why = (
        "the server becomes slower as it serves"
        if is_sure
        else "that could be noise, so validate again on a quieter machine"
    )
    earlier = f"{figures.requests:,} requests earlier"
    return f"M={figures.first_m} takes {slower:.2f}× as long as at first, {earlier}: {why}"


def _first_m_again(figures: AtRestFigures) -> tuple[float | None, float | None, float]:
    """Return how many times as long the first M took at the end, or None, and the ratio's lower limits, sure
    and likely: by the server's own speed or relative to the baseline's, whichever is less.
    """
    own = _log_speeds(figures.first, ()), _log_speeds(figures.last, ())
    relative = (
        _log_speeds(figures.first, figures.baseline_first),
        _log_speeds(figures.last, figures.baseline_last),
    )
    if not all((*own, *relative)):
        return None, None, 0.0
    slower = min(shift(first, last) for first, last in (own, relative))
    sure, likely = (
        min(least_shift(first, last, error) for first, last in (own, relative)) for error in (ERROR, UNSURE)
    )
    return math.exp(slower), math.exp(sure), math.exp(likely)


def _log_speeds(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the log speed of each repeat, relative to the baseline's repeat of the same block if there is
    one.
    """
    if not theirs:
        return [math.log(value) for value in ours]
    # A block that was broken off has a repeat of one side only.
    return [math.log(value / other) for value, other in zip(ours, theirs, strict=False)]


def _step(burst: Sequence[BurstPart], baseline_burst: Sequence[BurstPart]) -> tuple[float, int]:
    """Return the factor by which requests took longer from some part of the burst on, and that part.

    A step has every later part slower than every earlier one; the factor is 1 if there is none.
    """
    ours, theirs = _log_times(burst), _log_times(baseline_burst)
    largest, at = 0.0, 0
    for part in range(LEAST_PARTS, len(ours) - LEAST_PARTS + 1):
        if min(ours[part:]) > max(ours[:part]):
            step = _rise(ours, part) - max(0.0, _rise(theirs, part))
            if step > largest:
                largest, at = step, part
    return math.exp(largest), at


def _rise(values: Sequence[float], at: int) -> float:
    """Return the mean of the values from `at` on, divided by the mean of the values before."""
    return fmean(values[at:]) - fmean(values[:at]) if 0 < at < len(values) else 0.0


def _log_times(parts: Sequence[BurstPart]) -> list[float]:
    """Return the logarithm of a request's time in each part of a burst."""
    return [math.log(part.seconds / part.requests) for part in parts]


def _rate(parts: Sequence[BurstPart]) -> str:
    return f"{sum(part.requests for part in parts) / math.fsum(part.seconds for part in parts):.0f} a second"
