"""Whether tokens reach clients as they are generated, rather than all of them at the end.

Without streaming, TTFT is the whole request and TPOT is zero, so every other latency check would mislead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..evidence.verdict import CheckResult, CurvePoint, ServingFigures

NAME = "streamed"
LEAST_OF_BASELINE = 0.25
"""The least share of time after the first chunk, or the least TPOT, as a multiple of the baseline's. A sound
artifact that decodes faster, or whose prefill is slower, spends a smaller share after the first chunk."""
LEAST_SHARE = 0.05
"""The least share of time after the first chunk on the baseline: below it, a stream looks like a burst."""


def check_streamed(curve: Sequence[CurvePoint]) -> CheckResult:
    """Fail if the artifact's first chunk comes at the end of the request and the baseline's does not."""
    bound = (
        f"at least {LEAST_OF_BASELINE:.0%} of the baseline's time per output token, or of its share of time "
        "after the first chunk"
    )
    known = {
        point.m: (point.artifact.streamed_share, point.baseline.streamed_share)
        for point in curve
        if point.artifact.streamed_share is not None
        and point.baseline.streamed_share is not None
        and point.baseline.streamed_share >= LEAST_SHARE
    }
    if not known:
        reason = "the baseline's requests end with their first chunk, so there is nothing to compare with"
        return CheckResult(NAME, "unknown", "not known", bound, reason)
    burst = [
        point.m for point in curve if not is_streamed(stream_of(point.artifact), stream_of(point.baseline))
    ]
    lowest = burst[0] if burst else min(known, key=lambda m: known[m][0])
    ours, theirs = known[lowest]
    return CheckResult(
        name=NAME,
        status="fail" if burst else "pass",
        measured=f"{ours:.0%} of a request's time comes after its first chunk at M={lowest}",
        bound=bound,
        reason=(
            f"not streamed at M={', '.join(map(str, burst))}: everything comes in one burst at the end, "
            f"the first chunk after {1 - ours:.0%} of a request's time (the baseline's after "
            f"{1 - theirs:.0%}). Something between the engine and the client holds the tokens back: "
            "a proxy's buffer, or a server that does not flush"
            if burst
            else "tokens arrive while later ones are still generated, at every M"
        ),
        figures={f"streamed_share_m{m}": share for m, (share, _) in known.items()},
    )


@dataclass(frozen=True)
class Stream:
    """How one side's answers arrive at one M: medians, None if unknown."""

    share: float | None
    """The share of a request's time after its first chunk, 0 to 1."""
    tpot: float | None
    """Time per output token after the first, in a unit that both sides share."""


def stream_of(figures: ServingFigures) -> Stream:
    return Stream(figures.streamed_share, figures.tpot_p50_ms)


def is_streamed(ours: Stream, theirs: Stream) -> bool:
    """Say whether answers arrive in parts; true if it is unknown."""
    if ours.share is None or theirs.share is None or theirs.share < LEAST_SHARE:
        return True
    if ours.tpot is not None and theirs.tpot is not None and ours.tpot >= LEAST_OF_BASELINE * theirs.tpot:
        return True
    return ours.share >= LEAST_OF_BASELINE * theirs.share
