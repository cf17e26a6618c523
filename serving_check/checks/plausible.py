"""Whether the artifact is not faster than it can be: what looks too good was not computed.

The bound is physics with slack: a decode step reads every weight once, so the bytes of the weights bound it.
"""

from collections.abc import Sequence

from ..evidence.evidence import ModelFigures, RepeatedPrompts
from ..evidence.verdict import CheckResult, CurvePoint, Status
from ..settings import Bounds
from .streamed import is_streamed, stream_of

NAME = "plausible speed"
LEAST_REPEATED_TPOT = 0.5
"""TPOT of prompts sent for a second time, over that of the first: prefixes may be kept, tokens not."""


def check_plausible(
    curve: Sequence[CurvePoint],
    artifact: ModelFigures,
    baseline: ModelFigures,
    repeated: RepeatedPrompts | None,
    bounds: Bounds,
) -> CheckResult:
    """Fail where the artifact is surely faster than its weights allow, or answers known prompts at once."""
    known = artifact.weight_bytes and baseline.weight_bytes
    byte_ratio = baseline.weight_bytes / artifact.weight_bytes if known else 1.0
    fastest = bounds.max_speedup * max(1.0, byte_ratio)
    bound = (
        f"at most {fastest:.1f}× the baseline ({bounds.max_speedup:g} × {byte_ratio:.2f}, the ratio of the "
        f"weights' bytes); repeated prompts no faster than new ones"
    )
    if not curve:
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no repeat was finished")
    problems: list[str] = []
    statuses: list[Status] = ["pass"]
    for point in curve:
        if point.ratio is not None and point.ratio > fastest:
            sure = (point.decision_low or 0.0) > fastest
            statuses.append("fail" if sure else "inconclusive")
            problems.append(
                f"at M={point.m} it gives {point.ratio:.1f}× the baseline's tokens, and its weights have "
                f"{1 / byte_ratio:.2f} of the bytes" + ("" if sure else ", but that may be noise")
            )
        ours, theirs = point.artifact.tpot_p50_ms, point.baseline.tpot_p50_ms
        comes_in_parts = is_streamed(stream_of(point.artifact), stream_of(point.baseline))
        if comes_in_parts and ours is not None and theirs is not None and ours * fastest < theirs:
            statuses.append("fail")
            problems.append(
                f"at M={point.m} a token takes {ours:.3f} ms where a step of the baseline takes {theirs:.2f}"
            )
    if repeated is not None and repeated.second_tpot < LEAST_REPEATED_TPOT * repeated.first_tpot:
        statuses.append("fail")
        problems.append(
            "prompts that were sent before are answered from a cache: "
            f"{repeated.second_tpot * 1000:.3f} ms a token at M={repeated.m}, "
            f"{repeated.first_tpot * 1000:.2f} the first time"
        )
    status: Status = (
        "fail" if "fail" in statuses else "inconclusive" if "inconclusive" in statuses else "pass"
    )
    highest = max(curve, key=lambda point: point.ratio or 0.0)
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"highest ratio {highest.ratio or 0.0:.2f} at M={highest.m}",
        bound=bound,
        reason=(
            "implausible: " + "; ".join(problems) + ". No server computes that fast: look for answers that "
            "are kept, cut short, or not made by this model"
            if problems
            else "no faster than fewer bytes of weights can make it"
        ),
        figures={
            "byte_ratio": byte_ratio,
            "fastest": fastest,
            "highest_ratio": highest.ratio,
            "repeated_tpot_ratio": repeated.second_tpot / repeated.first_tpot if repeated else None,
        },
    )
