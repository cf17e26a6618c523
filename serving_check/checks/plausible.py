"""Whether the artifact is implausibly fast, so that its answers cannot have been computed.

The bound follows from memory traffic, with slack: a decode step reads every weight once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..evidence.evidence import ModelFigures, RepeatedPrompts
from ..evidence.verdict import CheckResult, CurvePoint, Status
from ..settings import Bounds
from .streamed import is_streamed, stream_of

NAME = "plausible speed"
LEAST_REPEATED_TPOT = 0.5
"""The least TPOT of prompts sent a second time, relative to the first time: answers must not be cached."""


def check_plausible(
    curve: Sequence[CurvePoint],
    artifact: ModelFigures,
    baseline: ModelFigures,
    repeated: RepeatedPrompts | None,
    bounds: Bounds,
) -> CheckResult:
    """Fail if the artifact is faster than its weights allow, or answers repeated prompts from a cache."""
    known = artifact.weight_bytes and baseline.weight_bytes
    byte_ratio = baseline.weight_bytes / artifact.weight_bytes if known else 1.0
    fastest = bounds.max_speedup * max(1.0, byte_ratio)
    bound = (
        f"at most {fastest:.1f}× the baseline ({bounds.max_speedup:g} × {byte_ratio:.2f}, the ratio of the "
        f"weights' bytes); repeated prompts no faster than new ones"
    )
    if not curve:
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no repeat was finished")
    problems = [
        problem for point in curve for problem in _problems_at(point, fastest, byte_ratio)
    ] + _problems_of_repeated(repeated)
    statuses = {problem.status for problem in problems}
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
            "implausible: "
            + "; ".join(problem.words for problem in problems)
            + ". No server computes that fast: look for answers that are cached, cut short, or "
            "made by another model"
            if problems
            else "no faster than its smaller weights allow"
        ),
        figures={
            "byte_ratio": byte_ratio,
            "fastest": fastest,
            "highest_ratio": highest.ratio,
            "repeated_tpot_ratio": repeated.second_tpot / repeated.first_tpot if repeated else None,
        },
    )


@dataclass(frozen=True)
class _Problem:
    status: Status
    words: str


def _problems_at(point: CurvePoint, fastest: float, byte_ratio: float) -> Iterator[_Problem]:
    """Yield the speeds at this M that are above `fastest` times the baseline's."""
    if point.ratio is not None and point.ratio > fastest:
        sure = (point.decision_low or 0.0) > fastest
        yield _Problem(
            "fail" if sure else "inconclusive",
            f"at M={point.m} it gives {point.ratio:.1f}× the baseline's tokens per second although its "
            f"weights have {1 / byte_ratio:.2f} of the bytes" + ("" if sure else ", but that may be noise"),
        )
    ours, theirs = point.artifact.tpot_p50_ms, point.baseline.tpot_p50_ms
    comes_in_parts = is_streamed(stream_of(point.artifact), stream_of(point.baseline))
    if comes_in_parts and ours is not None and theirs is not None and ours * fastest < theirs:
        yield _Problem(
            "fail",
            f"at M={point.m} a token takes {ours:.3f} ms, the baseline's {theirs:.2f} ms",
        )


def _problems_of_repeated(repeated: RepeatedPrompts | None) -> list[_Problem]:
    """Return a problem if prompts that were sent twice were answered too fast the second time."""
    if repeated is None or not repeated.second_tpot < LEAST_REPEATED_TPOT * repeated.first_tpot:
        return []
    return [
        _Problem(
            "fail",
            "prompts that were sent before are answered from a cache: "
            f"{repeated.second_tpot * 1000:.3f} ms a token at M={repeated.m}, "
            f"{repeated.first_tpot * 1000:.2f} the first time",
        )
    ]
