"""Whether the artifact's server stops from time to time while it serves: pauses that no average shows.

A repeat has stalled if no stream moved for far longer than in a typical repeat of the baseline. The machine
is shared, so the artifact's stalls are compared with the baseline's in the same minutes. If doubt remains,
both servers serve at the same time for a while: if the machine stops, both stall.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ..evidence.gaps import Gap
from ..evidence.in_use import BlockInUse
from ..evidence.measurement import MeasuredM, Repeat
from ..evidence.verdict import CheckResult, Status
from ..settings import Bounds
from ..statistics.decide import chance_of_as_many

NAME = "stalls"
LONGER = 3.0
"""A stall is so many times as long as the longest gap in a typical repeat of the baseline at that M. During
prefill, the bound on TTFT replaces this factor if it is larger."""
LONGER_S = 0.1
"""A stall is also so many seconds longer than that gap: a pause that a person notices."""
ERROR = 0.02
"""Fail at or below this chance of so many stalls on the artifact if both servers stall equally often."""
ERROR_TOGETHER = 0.04
"""The same for repeats that ran on both servers at once, if only one server stalled."""
CERTAIN = 0.001
"""The same for ending the measurement early: small, because it is tested at every look."""
UNSURE = 0.15
"""Above this chance the machine is taken to be the cause."""
SHOWN = 5


@dataclass(frozen=True)
class Stall:
    m: int | None
    """The M of the repeat; None for a load as in use."""
    at: float
    """Seconds since the first measured repeat of either side began."""
    seconds: float


def check_stalls(
    measured: Sequence[MeasuredM],
    bounds: Bounds,
    together: MeasuredM | None = None,
    in_use: Sequence[BlockInUse] = (),
) -> CheckResult:
    """Fail if the artifact's server stalls more often than chance on a shared machine explains.

    together: blocks whose repeats ran on both servers at once; None if there was no doubt
    in_use: blocks of a load as in use, all of whose stalls count, while in a repeat only the longest stall
            counts
    """
    bound = "no more stalls than the baseline has, beyond chance"
    both = _measured_on_both(measured)
    if not both:
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no repeat was finished")
    stalls, theirs = _all_stalls(measured, bounds, in_use)
    ours = len(stalls)
    pairs = [(block.artifact, block.baseline) for block in in_use if block.artifact and block.baseline]
    seconds = _seconds(repeat for level in both for repeat in level.artifact)
    seconds += math.fsum(side.duration for side, _ in pairs)
    baseline_seconds = _seconds(repeat for level in both for repeat in level.baseline)
    baseline_seconds += math.fsum(side.duration for _, side in pairs)
    chance = chance_of_as_many(ours, theirs, seconds / max(seconds + baseline_seconds, 1e-9))
    alone, theirs_alone = _stalls_alone(together, bounds)
    chance_alone = chance_of_as_many(alone, theirs_alone, 0.5)
    status: Status = "pass"
    if chance <= ERROR or chance_alone <= ERROR_TOGETHER:
        status = "fail"
    elif ours > 1 and chance <= UNSURE and (together is None or alone > theirs_alone):
        status = "inconclusive"
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"{ours} stalls, {theirs} of the baseline's",
        bound=bound,
        reason=_reason(stalls, theirs, seconds, status) + _of_both_at_once(together, alone, theirs_alone),
        figures={
            "stalled_repeats": ours,
            "baseline_stalled_repeats": theirs,
            "stalled_seconds": math.fsum(stall.seconds for stall in stalls),
            "chance": chance,
            "stalled_alone": alone,
            "baseline_stalled_alone": theirs_alone,
        },
    )


def surely_stalls(measured: Sequence[MeasuredM], bounds: Bounds) -> bool:
    """Say whether the stalls already decide, so that no more repeats are needed."""
    chance = check_stalls(measured, bounds).figures.get("chance")
    return isinstance(chance, float) and chance <= CERTAIN


def m_in_doubt(
    measured: Sequence[MeasuredM], bounds: Bounds, in_use: Sequence[BlockInUse] = ()
) -> int | None:
    """Return the M of the artifact's longest stall, if it stalled more often than the baseline but not often
    enough to fail; else None. For stalls in use alone the result is the largest M."""
    both = _measured_on_both(measured)
    if check_stalls(both, bounds, in_use=in_use).status == "fail":
        return None
    stalls, theirs = _all_stalls(measured, bounds, in_use)
    if len(stalls) <= theirs:
        return None
    of_repeats = [stall for stall in stalls if stall.m is not None]
    return max(of_repeats, key=lambda stall: stall.seconds).m if of_repeats else m_to_watch(measured)


def m_to_watch(measured: Sequence[MeasuredM]) -> int | None:
    """Return the largest M that both sides served; None if there is none."""
    return max((level.m for level in _measured_on_both(measured)), default=None)


def _measured_on_both(measured: Sequence[MeasuredM]) -> list[MeasuredM]:
    """Return the levels at which both sides have repeats: measuring may have ended before the largest M."""
    return [level for level in measured if level.artifact and level.baseline]


def _all_stalls(
    measured: Sequence[MeasuredM], bounds: Bounds, in_use: Sequence[BlockInUse]
) -> tuple[list[Stall], int]:
    """Return the artifact's stalls, and the number of the baseline's stalls."""
    both = _measured_on_both(measured)
    ours = [stall for level in both for stall in _stalls(level, level.artifact, measured, bounds)]
    theirs = sum(1 for level in both for _ in _stalls(level, level.baseline, measured, bounds))
    pairs = [(block.artifact, block.baseline) for block in in_use if block.artifact and block.baseline]
    if pairs:
        usual = median(max((gap.seconds for gap in side.gaps), default=0.0) for _, side in pairs)
        least = max(usual * LONGER, usual + LONGER_S)
        origin = _origin(measured)
        ours += [
            Stall(None, side.began - origin + gap.at, gap.seconds)
            for side, _ in pairs
            for gap in side.gaps
            if gap.seconds > least
        ]
        theirs += sum(gap.seconds > least for _, side in pairs for gap in side.gaps)
    return ours, theirs


def _origin(measured: Sequence[MeasuredM]) -> float:
    return min(repeat.began for level in measured for repeat in (*level.artifact, *level.baseline))


def _stalls(
    level: MeasuredM, repeats: Sequence[Repeat], measured: Sequence[MeasuredM], bounds: Bounds
) -> Iterator[Stall]:
    """Yield the longest stall of each repeat that has any stall. All `repeats` belong to one side."""
    origin, least = _origin(measured), _least_stalls(level, bounds)
    for repeat in repeats:
        if gap := _longest_stall(repeat, least):
            yield Stall(level.m, repeat.began - origin + gap.at, gap.seconds)


def _stalls_alone(together: MeasuredM | None, bounds: Bounds) -> tuple[int, int]:
    """Return the number of blocks in which only the artifact stalled, and in which only the baseline did; the
    repeats of a block ran at the same time.
    """
    alone = [0, 0]
    if together is not None and together.blocks:
        least = _least_stalls(together, bounds)
        for block in together.blocks:
            stalled = [
                any(_longest_stall(repeat, least) for repeat in repeats)
                for repeats in (block.artifact, block.baseline)
            ]
            if sum(stalled) == 1:
                alone[stalled.index(True)] += 1
    return alone[0], alone[1]


def _longest_stall(repeat: Repeat, least: tuple[float, float]) -> Gap | None:
    gaps = (repeat.gaps.filling, repeat.gaps.decoding)
    found = [gap for gap, seconds in zip(gaps, least, strict=True) if gap.seconds > seconds]
    return max(found, key=lambda gap: gap.seconds, default=None)


def _least_stalls(level: MeasuredM, bounds: Bounds) -> tuple[float, float]:
    """Return the seconds from which on a gap at this M is a stall: during prefill, and while all requests
    decode.
    """
    prefill, decoding = (
        median(gaps)
        for gaps in zip(
            *((repeat.gaps.filling.seconds, repeat.gaps.decoding.seconds) for repeat in level.baseline),
            strict=True,
        )
    )
    slower = max(LONGER, bounds.max_ttft_ratio)
    return max(prefill * slower, prefill + LONGER_S), max(decoding * LONGER, decoding + LONGER_S)


def _seconds(repeats: Iterator[Repeat]) -> float:
    return math.fsum(repeat.duration for repeat in repeats)


def _reason(stalls: Sequence[Stall], theirs: int, seconds: float, status: Status) -> str:
    if not stalls:
        return "no stream paused for much longer than the baseline's streams do"
    placed = sorted(stalls, key=lambda stall: stall.at)
    times = ", ".join(
        f"{stall.seconds:.2f} s at {stall.at:.1f} s ({_where(stall)})" for stall in placed[:SHOWN]
    )
    more = f" and {len(placed) - SHOWN} times more" if len(placed) > SHOWN else ""
    share = math.fsum(stall.seconds for stall in stalls) / max(seconds, 1e-9)
    where = f"no stream moved for {times}{more}: {share:.1%} of its serving time"
    if status == "fail":
        return f"{where}. The server stops, not the machine: the baseline stalled {theirs} times on it"
    if status == "inconclusive":
        return f"{where}. The machine may be the cause: validate again on a quieter one"
    return f"{where}; the baseline stalled {theirs} times, so the machine may be the cause"


def _where(stall: Stall) -> str:
    return "in use" if stall.m is None else f"M={stall.m}"


def _of_both_at_once(together: MeasuredM | None, alone: int, theirs_alone: int) -> str:
    if together is None or not together.blocks:
        return ""
    seconds = _seconds(iter(together.artifact))
    return (
        f". With both served at once for {seconds:.0f} s at M={together.m}, the artifact alone stalled "
        f"{alone} times, the baseline alone {theirs_alone} times"
    )
