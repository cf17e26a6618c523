"""Output throughput against a rival's: a format that reads fewer bytes must lose once requests are batched.

`curve.rival_decisions_of` decides; this file puts the decision into words. Source: ds4-nvfp4-spark issue 6,
which requires that NVFP4 beats IQ2_XXS from M = 4 on.
"""

from collections.abc import Sequence

from ..evidence.verdict import CheckResult, CurvePoint, RivalPoint, Status

NAME = "rival"


def check_rival(curve: Sequence[CurvePoint], from_m: float, max_blocks: int) -> CheckResult:
    """Pass if the artifact is faster than the rival, with confidence, at every M from `from_m` on.

    Lower Ms are shown and do not affect the result.
    """
    points = [(point.m, point, point.rival) for point in curve if point.rival is not None]
    voting = [(m, point, rival) for m, point, rival in points if rival.status is not None]
    failed = [entry for entry in voting if entry[2].status == "fail"]
    undecided = [entry for entry in voting if entry[2].status == "inconclusive"]
    status: Status = "fail" if failed else "inconclusive" if undecided or not voting else "pass"
    worst = min(voting, key=lambda entry: entry[2].ratio or 0.0, default=None)
    if failed:
        reason = "\n".join(
            f"at M={m}: {point.artifact.output_throughput:.0f} tok/s against the rival's "
            f"{rival.figures.output_throughput:.0f}, ratio {_ratio(rival)}"
            for m, point, rival in failed
        )
    elif undecided:
        listed = ", ".join(f"M={m} ({_ratio(rival)})" for m, _, rival in undecided)
        blocks = min(max_blocks, max(len(point.log_ratios) for _, point, _ in undecided))
        reason = f"could not be decided within {blocks} blocks of repeats: {listed}"
    elif not voting:
        reason = (
            f"no M of at least {from_m:g} was measured completely; add some (--m), or lower --rival-from-m"
        )
    else:
        reason = f"every ratio from M={from_m:g} on is above 1 with confidence"
    shown = ", ".join(f"M={m} ({_ratio(rival)})" for m, _, rival in points if rival.status is None)
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"lowest {_ratio(worst[2])} at M={worst[0]}" if worst else "nothing",
        bound=f"more output tok/s than the rival at every M from {from_m:g} on",
        reason=reason + (f"; not counted: {shown}" if shown else ""),
        figures={f"ratio_m{m}": rival.ratio for m, _, rival in points},
    )


def _ratio(rival: RivalPoint) -> str:
    low, high = ("?" if limit is None else f"{limit:.3f}" for limit in (rival.ratio_low, rival.ratio_high))
    return "no ratio" if rival.ratio is None else f"{rival.ratio:.3f} [{low}, {high}]"
