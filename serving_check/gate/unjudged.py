"""Leaves speed unjudged if a server emulates the format of its inputs, which is slower than the format.

Figures stay as they were measured. Everything besides speed is judged as usual.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..checks.in_use.profile import NAME as PROFILE
from ..checks.in_use.speed import NAME as SPEED_IN_USE
from ..checks.latency import NAME as LATENCY
from ..checks.part_throughput import DECODING, PROMPTS
from ..checks.plausible import NAME as PLAUSIBLE
from ..checks.rival import NAME as RIVAL
from ..checks.stalls import NAME as STALLS
from ..checks.throughput import NAME as THROUGHPUT
from ..checks.undisturbed import NAME as UNDISTURBED
from ..evidence.emulation import EmulatedProducts, in_words, is_speed_real
from ..evidence.verdict import CheckResult, CurvePoint, PartPoint

OF_SPEED = (THROUGHPUT, DECODING, PROMPTS, LATENCY, STALLS, UNDISTURBED, SPEED_IN_USE, PROFILE, RIVAL)
"""Checks that compare the artifact's speed with another server's. `plausible speed`, which fails artifacts
that are too fast, is one of them only if the baseline is emulated."""


def unjudged_checks(
    checks: Sequence[CheckResult], emulated: Sequence[EmulatedProducts]
) -> tuple[CheckResult, ...]:
    """Return the checks, with those of speed unknown if it was emulated."""
    if not emulated:
        return tuple(checks)
    reason = (
        f"not judged: {in_words(emulated)} here, not at the format's speed. The verdict's first line "
        "says where to judge it"
    )
    names = (RIVAL,) if is_speed_real(emulated) else OF_SPEED
    if any(products.side == "baseline" for products in emulated):
        names = (*names, PLAUSIBLE)
    return tuple(
        replace(check, status="unknown", measured=f"emulated: {check.measured}", reason=reason)
        if check.name in names
        else check
        for check in checks
    )


def unjudged_curve(
    curve: Sequence[CurvePoint], emulated: Sequence[EmulatedProducts]
) -> tuple[CurvePoint, ...]:
    """Return the curve, without a result at any M if speed was emulated."""
    if not emulated:
        return tuple(curve)
    beside_rival = [
        point if point.rival is None else replace(point, rival=replace(point.rival, status=None))
        for point in curve
    ]
    if is_speed_real(emulated):
        return tuple(beside_rival)
    return tuple(
        replace(point, status="unknown", steady=_unjudged(point.steady), prompts=_unjudged(point.prompts))
        for point in beside_rival
    )


def _unjudged(part: PartPoint | None) -> PartPoint | None:
    return None if part is None else replace(part, status="unknown")
