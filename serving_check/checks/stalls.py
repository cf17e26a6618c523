"""Whether the artifact's server stops now and then while it serves: pauses that no average shows.

A repeat has stalled where no stream moved for far longer than in a typical repeat of the baseline. The
machine is shared, so the artifact's stalls are compared with the baseline's in the same minutes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ..gaps import Gap
from ..measurement import MeasuredM, Repeat
from ..verdict import CheckResult, Status

NAME = "stalls"
LONGER = 3.0
"""Times the longest gap of a typical repeat of the baseline at that M."""
LONGER_S = 0.1
"""Seconds beyond that gap: what a person sees as a pause."""
FEWEST = 3
"""Stalled repeats before a fail."""
ERROR = 0.02
"""Chance that so many of the stalls fall on the artifact's repeats if both servers stall alike: fail."""
ERROR_ALONE = 0.15
"""The same where the baseline never stalled: that speaks for the machine, so less is asked."""
SHOWN = 5


@dataclass(frozen=True)
class Stall:
    m: int
    at: float
    """Seconds since the first measured repeat, of either side, began."""
    seconds: float


def check_stalls(measured: Sequence[MeasuredM]) -> CheckResult:
    """Fail where the artifact's repeats stall more often than a shared machine's chance gives."""
    bound = "no more repeats with a stall than the baseline's, but for chance"
    both = [one for one in measured if one.artifact and one.baseline]
    if not both:
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no repeat was finished")
    stalls = [stall for one in both for stall in _stalls(one, one.artifact, measured)]
    ours, theirs = len(stalls), sum(1 for one in both for _ in _stalls(one, one.baseline, measured))
    seconds = _seconds(repeat for one in both for repeat in one.artifact)
    baseline_seconds = _seconds(repeat for one in both for repeat in one.baseline)
    chance = chance_of_as_many(ours, theirs, seconds / max(seconds + baseline_seconds, 1e-9))
    status: Status = "pass"
    if ours > 1 and chance <= (ERROR if theirs else ERROR_ALONE):
        status = "fail" if ours >= FEWEST else "inconclusive"
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"{ours} repeats with a stall, the baseline's {theirs}",
        bound=bound,
        reason=_reason(stalls, theirs, seconds, status),
        figures={
            "stalled_repeats": ours,
            "baseline_stalled_repeats": theirs,
            "stalled_seconds": math.fsum(stall.seconds for stall in stalls),
            "chance": chance,
        },
    )


def needs_another_look(measured: Sequence[MeasuredM]) -> bool:
    """Whether more repeats would tell: the artifact alone has stalled, but not often enough to be sure."""
    figures = check_stalls(measured).figures
    ours, theirs = figures.get("stalled_repeats") or 0, figures.get("baseline_stalled_repeats") or 0
    return theirs == 0 and 0 < float(ours) < FEWEST


def chance_of_as_many(ours: int, theirs: int, share: float) -> float:
    """The chance that at least `ours` of all stalls fall on our `share` of the time: a binomial's tail."""
    total = ours + theirs
    return math.fsum(
        math.comb(total, count) * share**count * (1 - share) ** (total - count)
        for count in range(ours, total + 1)
    )


def _stalls(one: MeasuredM, repeats: Sequence[Repeat], measured: Sequence[MeasuredM]) -> Iterator[Stall]:
    """At most one of each of `repeats`, which are one side's of `one`: its longest."""
    origin = min(repeat.began for each in measured for repeat in (*each.artifact, *each.baseline))
    filling = _least_stall([repeat.gaps.filling for repeat in one.baseline])
    decoding = _least_stall([repeat.gaps.decoding for repeat in one.baseline])
    for repeat in repeats:
        found = [
            gap
            for gap, least in ((repeat.gaps.filling, filling), (repeat.gaps.decoding, decoding))
            if gap.seconds > least
        ]
        if found:
            longest = max(found, key=lambda gap: gap.seconds)
            yield Stall(one.m, repeat.began - origin + longest.at, longest.seconds)


def _least_stall(baseline: Sequence[Gap]) -> float:
    typical = median(gap.seconds for gap in baseline)
    return max(typical * LONGER, typical + LONGER_S)


def _seconds(repeats: Iterator[Repeat]) -> float:
    return math.fsum(repeat.duration for repeat in repeats)


def _reason(stalls: Sequence[Stall], theirs: int, seconds: float, status: Status) -> str:
    if not stalls:
        return "no stream stood still for longer than is usual beside the baseline"
    placed = sorted(stalls, key=lambda stall: stall.at)
    times = ", ".join(f"{stall.seconds:.2f} s at {stall.at:.1f} s (M={stall.m})" for stall in placed[:SHOWN])
    more = f" and {len(placed) - SHOWN} times more" if len(placed) > SHOWN else ""
    share = math.fsum(stall.seconds for stall in stalls) / max(seconds, 1e-9)
    where = f"no stream moved for {times}{more}: {share:.1%} of the time it served"
    if status == "fail":
        return f"{where}. The server stops, not the machine, on which the baseline's stalled {theirs} times"
    if status == "inconclusive":
        return f"{where}. That may be the machine: validate again on a quieter one"
    return f"{where}; the baseline's stalled {theirs} times, so it may be the machine"
