"""Whether each request's latency stays bounded while M grows, against the baseline's in the same workload."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..evidence.measurement import MeasuredM, Repeat, slowest_tpot, slowest_ttft
from ..evidence.verdict import CheckResult, Status
from ..settings import Bounds
from ..statistics.trimmed_mean import interval
from ..workload import percentile
from .streamed import Stream, is_streamed

NAME = "latency"
ERROR = 0.05
TTFT_ALLOWANCE_S = 0.02
"""Seconds added to both sides before dividing: nobody notices 6 ms against 3, everybody 600 against 300."""
ITL_ALLOWANCE_S = 0.02


@dataclass(frozen=True)
class _Ratio:
    """The ratio of one latency figure at one M."""

    name: str
    level: MeasuredM
    value: float
    """The ratio, artifact over baseline."""
    bound: float
    sure: bool
    """Whether the lower confidence limit is above the bound as well."""


def check_latency(measured: Sequence[MeasuredM], bounds: Bounds) -> CheckResult:
    """Judge the slowest requests' TPOT, TTFT and time between tokens, artifact over baseline, at every M.

    The bounds have slack, so an estimate within its bound passes. A fail needs the lower confidence limit
    above the bound; an estimate above the bound that could be chance is inconclusive.
    """
    ratios = _ratios(measured, bounds)
    slow = [ratio for ratio in ratios if ratio.value > ratio.bound]
    worst: dict[str, _Ratio] = {}
    for ratio in ratios:
        worst[ratio.name] = max(worst.get(ratio.name, ratio), ratio, key=lambda ratio: ratio.value)
    status: Status = "pass" if ratios and not slow else "inconclusive"
    if any(ratio.sure for ratio in slow):
        status = "fail"
    reason = "the slowest requests keep up with the baseline's at every M"
    if not ratios:
        reason = "no repeat was finished, so there is nothing to compare"
    elif slow:
        reason = "; ".join(_problem(ratio, measured) for ratio in slow)
    return CheckResult(
        name=NAME,
        status=status,
        measured=", ".join(f"{name} {ratio.value:.2f}× at M={ratio.level.m}" for name, ratio in worst.items())
        or "nothing",
        bound=f"the baseline's TPOT ×{bounds.max_tpot_ratio:g}, TTFT ×{bounds.max_ttft_ratio:g} and 99.9th "
        f"percentile of ITL ×{bounds.max_itl_ratio:g} at most",
        reason=reason,
        figures={f"{ratio.name.lower()}_ratio_m{ratio.level.m}": ratio.value for ratio in ratios},
    )


def _ratios(measured: Sequence[MeasuredM], bounds: Bounds) -> list[_Ratio]:
    """Return the ratios that exist: a single output token has no TPOT, an unfinished block has no figure at
    all.
    """
    error = ERROR / max(1, len(measured))
    ratios = []
    for level in measured:
        for name, figure, bound in (
            ("TPOT", slowest_tpot, bounds.max_tpot_ratio),
            ("TTFT", _allowed_ttft, bounds.max_ttft_ratio),
            ("ITL", _allowed_itl, bounds.max_itl_ratio),
        ):
            if logs := level.log_ratios(figure):
                low, _ = interval(logs, error, error)
                mean = math.fsum(logs) / len(logs)
                ratios.append(_Ratio(name, level, math.exp(mean), bound, low > math.log(bound)))
    return ratios


def _allowed_ttft(repeat: Repeat) -> float | None:
    ttft = slowest_ttft(repeat)
    return None if ttft is None else ttft + TTFT_ALLOWANCE_S


def _allowed_itl(repeat: Repeat) -> float | None:
    return None if repeat.itl_p999 is None else repeat.itl_p999 + ITL_ALLOWANCE_S


def _problem(ratio: _Ratio, measured: Sequence[MeasuredM]) -> str:
    certainty = "" if ratio.sure else ", but that could be noise: validate again on a quieter machine"
    what = {
        "TPOT": "the slowest requests' TPOT",
        "TTFT": "the slowest requests' TTFT",
        "ITL": "the 99.9th percentile of the time between tokens",
    }[ratio.name]
    return (
        f"at M={ratio.level.m} {what} is {ratio.value:.2f}× the baseline's, bound {ratio.bound:g}×: "
        f"{_cause(ratio, measured)}{certainty}"
    )


def _cause(ratio: _Ratio, measured: Sequence[MeasuredM]) -> str:
    if not is_streamed(_stream_of(ratio.level.artifact), _stream_of(ratio.level.baseline)):
        return "nothing is streamed: the first token arrives with the last"
    if ratio.name == "ITL":
        return "a few steps take far longer than the rest: something else runs in them from time to time"
    if ratio.name == "TTFT":
        return _ttft_cause(ratio.level)
    return _tpot_cause(ratio.level, measured, ratio.bound)


def _ttft_cause(level: MeasuredM) -> str:
    if level.m == 1:
        return "a single prompt takes longer to prefill, or waits while nothing else runs"
    return "requests wait in the queue or behind long prefills"


def _tpot_cause(level: MeasuredM, measured: Sequence[MeasuredM], bound: float) -> str:
    """Return the cause of a slow TPOT, from the other requests and the other Ms."""
    typical = _typical_ratio(level)
    if typical is not None and typical <= bound:
        return (
            f"the median request's is {typical:.2f}×, so a few are slow: pauses, or requests served unequally"
        )
    ratios = {other.m: ratio for other in measured if (ratio := _typical_ratio(other)) is not None}
    # Measuring may have ended at the first M, which need not be the smallest.
    fewest = min(ratios, default=level.m)
    alone = ratios.get(fewest, math.inf)
    if fewest == level.m > 1:
        return (
            f"every decode step takes longer at M={fewest} ({alone:.2f}×); no smaller M was measured, so it "
            "is not known whether the batch size is the cause"
        )
    if fewest == level.m or alone > bound:
        return (
            f"every decode step takes longer, from M={fewest} on ({alone:.2f}×), so the batch size is not "
            "the cause: look for a slow kernel or layout, or slow engine work between steps"
        )
    return f"decode steps take longer as the batch grows (M={fewest}: {alone:.2f}×)"


def _typical_ratio(level: MeasuredM) -> float | None:
    """Return the TPOT of the median request, artifact over baseline."""
    logs = level.log_ratios(lambda repeat: percentile(list(repeat.tpots), 50))
    return math.exp(sum(logs) / len(logs)) if logs else None


def _stream_of(repeats: Sequence[Repeat]) -> Stream:
    shares = [repeat.streamed_share for repeat in repeats if repeat.streamed_share is not None]
    tpots = [tpot for repeat in repeats for tpot in repeat.tpots]
    return Stream(median(shares) if shares else None, median(tpots) if tpots else None)
