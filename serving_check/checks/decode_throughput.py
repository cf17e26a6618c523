"""Throughput of decoding alone, artifact over baseline: with long prompts, prefill would hide a slow step.

`curve.steady_decisions_of` decides; this file puts the decision into words.
"""

from collections.abc import Mapping, Sequence

from ..evidence.verdict import CheckResult, CurvePoint, Status, SteadyPoint
from ..workload.spec import MILLISECONDS

NAME = "decode throughput"


def check_decode_throughput(
    curve: Sequence[CurvePoint], floor: float, context: int, diagnoses: Mapping[int, str]
) -> CheckResult:
    """Fail if decoding is slower than `floor` with confidence at any M, pass if it is not at every M.

    context:   tokens of a prompt
    diagnoses: for each M that failed, which layer is to blame
    """
    points = [(point.m, point.steady) for point in curve if point.steady is not None]
    failed = [(m, point) for m, point in points if point.status == "fail"]
    undecided = [(m, point) for m, point in points if point.status == "inconclusive"]
    status: Status = "fail" if failed else "inconclusive" if undecided or not points else "pass"
    worst = min(points, key=lambda entry: entry[1].ratio or 0.0, default=None)
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"lowest {_ratio(worst[1])} at M={worst[0]}" if worst else "nothing",
        bound=f"at least {floor:.2f} of the baseline's output tok/s while all M decode after prompts of "
        f"{context} tokens",
        reason=_reason(failed, undecided, bool(points), diagnoses),
        figures={f"decode_ratio_m{m}": point.ratio for m, point in points},
    )


def _reason(
    failed: Sequence[tuple[int, SteadyPoint]],
    undecided: Sequence[tuple[int, SteadyPoint]],
    any_at_all: bool,
    diagnoses: Mapping[int, str],
) -> str:
    if failed:
        return "\n".join(
            f"at M={m} a decode step takes {_step_ms(m, point.artifact)} ms against the "
            f"baseline's {_step_ms(m, point.baseline)}, prefill not counted: ratio {_ratio(point)}. "
            f"{diagnoses.get(m, '')}".strip()
            for m, point in failed
        )
    unseen = [m for m, point in undecided if point.artifact is None or point.baseline is None]
    if unseen:
        return (
            f"M={', '.join(map(str, unseen))}: all M requests hardly ever decoded at once, so decode "
            "throughput is unknown. Ask for longer answers (--output-len) or larger prefill chunks "
            "(--prefill-chunk)"
        )
    if undecided:
        ms = ", ".join(f"M={m} ({_ratio(point)})" for m, point in undecided)
        return f"could not be decided: {ms}. Validate again on a quieter machine, or with longer answers"
    return "decoding alone keeps up at every M" if any_at_all else "no block of repeats was finished"


def _ratio(point: SteadyPoint) -> str:
    if point.ratio is None:
        return "no ratio"
    low, high = ("?" if limit is None else f"{limit:.3f}" for limit in (point.ratio_low, point.ratio_high))
    return f"{point.ratio:.3f} [{low}, {high}]"


def _step_ms(m: int, tokens_per_second: float | None) -> str:
    return f"{MILLISECONDS * m / tokens_per_second:.2f}" if tokens_per_second else "?"
