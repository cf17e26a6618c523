"""Whether each request's latency stays bounded while M grows, against the baseline's in the same workload."""

import math
from collections.abc import Sequence

from ..measurement import MeasuredM, Repeat, slowest_tpot, slowest_ttft
from ..settings import Bounds
from ..statistics import interval
from ..verdict import CheckResult, Status

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
                problems.append(_problem(name, one, ratio, bound, sure))
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


def _problem(name: str, one: MeasuredM, ratio: float, bound: float, sure: bool) -> str:
    cause = (
        "requests wait in the queue or behind long prefills"
        if name == "TTFT"
        else "decode steps take longer as the batch grows"
    )
    certainty = "" if sure else ", but that could be noise: validate again on a quieter machine"
    return (
        f"at M={one.m} the slowest requests' {name} is {ratio:.2f}× the baseline's, bound {bound:g}×: "
        f"{cause}{certainty}"
    )
