"""Throughput of decoding alone, and of prompts alone, artifact over baseline.

If parts were not judged separately, a part that is fast or takes most of the time would hide that the other
part is slow. `curve.py` decides, and `evidence/parts.py` selects the parts and Ms to judge; this file puts
the decisions into words.
"""

from collections.abc import Mapping, Sequence

from ..evidence.parts import LARGE, SMALL
from ..evidence.verdict import CheckResult, CurvePoint, PartPoint, Status
from ..workload.spec import MILLISECONDS

DECODING = "decode throughput"
PROMPTS = "prompt throughput"
Points = Sequence[tuple[int, PartPoint]]
"""The figures of one part of requests, for each M at which that part is judged separately."""


def check_decode_throughput(
    curve: Sequence[CurvePoint], floor: float, diagnoses: Mapping[int, str]
) -> CheckResult:
    """Fail if decoding is slower than `floor` with confidence at any M, pass if it is not at every M.

    diagnoses: for each M that failed, which layer is to blame
    """
    points = [(point.m, point.steady) for point in curve if point.steady is not None]
    failed = [
        f"at M={m} a decode step takes {_step_ms(m, point.artifact)} ms against the "
        f"baseline's {_step_ms(m, point.baseline)}, prefill not counted: ratio {_ratio(point)}. "
        f"{diagnoses.get(m, '')}".strip()
        for m, point in points
        if point.status == "fail"
    ]
    return CheckResult(
        name=DECODING,
        status=_status(points),
        measured=_lowest(points),
        bound=f"at least {floor:.2f} of the baseline's output tok/s while no prompt is read, at every M at "
        f"which decoding takes over {SMALL:.0%} of the baseline's time",
        reason="\n".join(failed) or _unseen(points) or _undecided(points) or "decoding alone keeps up",
        figures={f"decode_ratio_m{m}": point.ratio for m, point in points},
    )


def check_prompt_throughput(curve: Sequence[CurvePoint], floor: float) -> CheckResult:
    """Fail if prompts are surely read slower than `floor` at any M at which they take much of the time; pass
    if they are fast enough at every such M."""
    points = [(point.m, point.prompts) for point in curve if point.prompts is not None]
    shares = {point.m: point.prompt_share or 0.0 for point in curve}
    failed = [
        f"at M={m}, where prompts take {shares[m]:.0%} of the baseline's time, {point.artifact or 0:,.0f} "
        f"prompt tokens are read a second against the baseline's {point.baseline or 0:,.0f}: ratio "
        f"{_ratio(point)}"
        for m, point in points
        if point.status == "fail"
    ]
    return CheckResult(
        name=PROMPTS,
        status=_status(points),
        measured=_lowest(points),
        bound=f"at least {floor:.2f} of the baseline's prompt tok/s while some request has no token yet, at "
        f"every given M at which that takes over {LARGE:.0%} of the baseline's time",
        reason="\n".join(failed) or _undecided(points) or "prompts alone keep up",
        figures={f"prompt_ratio_m{m}": point.ratio for m, point in points},
    )


def _status(points: Points) -> Status:
    statuses = {point.status for _, point in points}
    if "fail" in statuses:
        return "fail"
    return "pass" if statuses == {"pass"} else "inconclusive"


def _lowest(points: Points) -> str:
    """Return the lowest ratio as text: `lowest 0.950 [0.940, 0.960] at M=8`."""
    if not points:
        return "nothing"
    m, point = min(points, key=lambda entry: entry[1].ratio or 0.0)
    return f"lowest {_ratio(point)} at M={m}"


def _ratio(point: PartPoint) -> str:
    if point.ratio is None:
        return "no ratio"
    low, high = ("?" if limit is None else f"{limit:.3f}" for limit in (point.ratio_low, point.ratio_high))
    return f"{point.ratio:.3f} [{low}, {high}]"


def _unseen(points: Points) -> str:
    """Return a sentence on the Ms at which no decoding was seen; empty if there is none."""
    ms = [
        str(m)
        for m, point in points
        if point.status == "inconclusive" and (point.artifact is None or point.baseline is None)
    ]
    if not ms:
        return ""
    return (
        f"M={', '.join(ms)}: hardly more than half of M requests ever decoded at once, so decode throughput "
        "is unknown. Ask for longer answers (--output-len) or larger prefill chunks (--prefill-chunk)"
    )


def _undecided(points: Points) -> str:
    """Return a sentence on undecided Ms; empty if there is none."""
    if not points:
        return "no block of repeats was finished"
    open_points = [f"M={m} ({_ratio(point)})" for m, point in points if point.status == "inconclusive"]
    if not open_points:
        return ""
    return (
        f"could not be decided: {', '.join(open_points)}. Validate again on a quieter machine, or with "
        "longer requests"
    )


def _step_ms(m: int, tokens_per_second: float | None) -> str:
    return f"{MILLISECONDS * m / tokens_per_second:.2f}" if tokens_per_second else "?"
