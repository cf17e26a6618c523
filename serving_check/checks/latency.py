"""Whether each request's latency stays bounded while M grows, against the baseline's in the same workload."""

import math
from collections.abc import Sequence

from ..measurement import MeasuredM, Repeat, slowest_tpot, slowest_ttft
from ..settings import Bounds
from ..statistics import interval
from ..verdict import CheckResult, Status
from ..workload import percentile

NAME = "latency"
ERROR = 0.05
TTFT_ALLOWANCE_S = 0.02
"""Added to both sides before dividing: nobody notices 6 ms against 3, everybody 600 against 300."""


def check_latency(measured: Sequence[MeasuredM], bounds: Bounds) -> CheckResult:
    """The slowest requests' TPOT and TTFT, artifact over baseline, at every M.

    A guard with slack in its bounds, so the estimate decides a pass; a fail needs the lower confidence limit
    above the bound, and an estimate above it that could be chance is inconclusive.
    """
    error = ERROR / max(1, len(measured))
    statuses: list[Status] = []
    worst: dict[str, tuple[float, int]] = {}
    problems = []
    figures: dict[str, float | int | str | None] = {}
    for one in measured:
        for name, figure, bound in (
            ("TPOT", slowest_tpot, bounds.max_tpot_ratio),
            ("TTFT", _allowed_ttft, bounds.max_ttft_ratio),
        ):
            logs = one.log_ratios(figure)
            if not logs:
                # One output token has no TPOT; that there is a TTFT is the zero-failures check's affair.
                continue
            ratio = math.exp(sum(logs) / len(logs))
            low, _ = interval(logs, error, error)
            figures[f"{name.lower()}_ratio_m{one.m}"] = ratio
            worst[name] = max(worst.get(name, (0.0, 0)), (ratio, one.m))
            if ratio > bound:
                sure = low > math.log(bound)
                statuses.append("fail" if sure else "inconclusive")
                cause = _ttft_cause(one) if name == "TTFT" else _tpot_cause(one, measured, bound)
                problems.append(_problem(name, one, ratio, bound, cause, sure))
    status: Status = "fail" if "fail" in statuses else "inconclusive" if statuses or not worst else "pass"
    return CheckResult(
        name=NAME,
        status=status,
        measured=", ".join(f"{name} {ratio:.2f}× at M={m}" for name, (ratio, m) in worst.items())
        or "nothing",
        bound=f"the baseline's TPOT ×{bounds.max_tpot_ratio:g} and TTFT ×{bounds.max_ttft_ratio:g} at most",
        reason="; ".join(problems) or "the slowest requests keep up with the baseline's at every M",
        figures=figures,
    )


def _allowed_ttft(result: Repeat) -> float | None:
    ttft = slowest_ttft(result)
    return None if ttft is None else ttft + TTFT_ALLOWANCE_S


def _ttft_cause(one: MeasuredM) -> str:
    if one.m == 1:
        return "a prompt alone takes longer to prefill, or waits although nothing else runs"
    return "requests wait in the queue or behind long prefills"


def _tpot_cause(one: MeasuredM, measured: Sequence[MeasuredM], bound: float) -> str:
    """What the other requests and the other Ms say of a slow TPOT."""
    typical = _typical_ratio(one)
    if typical is not None and typical <= bound:
        return (
            f"the median request's is {typical:.2f}×, so a few are slow: pauses, or requests served unequally"
        )
    fewest = min(measured, key=lambda other: other.m)
    alone = _typical_ratio(fewest)
    if fewest is one or (alone is not None and alone > bound):
        return (
            f"every decode step takes longer, from M={fewest.m} on ({alone or math.inf:.2f}×), so it is not "
            "the batch's size: a slow kernel or layout, or the engine's own work between steps"
        )
    return f"decode steps take longer as the batch grows (M={fewest.m}: {alone or math.nan:.2f}×)"


def _typical_ratio(one: MeasuredM) -> float | None:
    """Of the median request's TPOT, artifact over baseline."""
    logs = one.log_ratios(lambda repeat: percentile(list(repeat.tpots), 50))
    return math.exp(sum(logs) / len(logs)) if logs else None


def _problem(name: str, one: MeasuredM, ratio: float, bound: float, cause: str, sure: bool) -> str:
    certainty = "" if sure else ", but that could be noise: validate again on a quieter machine"
    return (
        f"at M={one.m} the slowest requests' {name} is {ratio:.2f}× the baseline's, bound {bound:g}×: "
        f"{cause}{certainty}"
    )
