"""Whether M requests really decoded together, rather than some of them while the rest were queued."""

from collections.abc import Sequence

from ..adapters.prometheus_text import total
from ..adapters.series import SCALEGATE_SERIES, Series
from ..evidence.verdict import CheckResult, CurvePoint, ServingFigures

NAME = "M reached"


def most_running(samples: dict[str, float], series: Series = SCALEGATE_SERIES) -> int | None:
    """How many requests a server runs together at most, as its `/metrics` say; None where they do not."""
    limit = total(samples, series.max_num_seqs)
    return None if limit is None else int(limit)


def check_reached(curve: Sequence[CurvePoint], share: float, limit: int | None = None) -> CheckResult:
    """Fail if the average output token of the artifact saw fewer than `share` of M requests running.

    limit: the server's own limit on running requests, if known
    """
    short = [point for point in curve if _share(point) < share]
    lowest = min(curve, key=_share, default=None)
    if lowest is None:
        return CheckResult(
            NAME, "inconclusive", "nothing", f"{share:.0%} of M running", "no repeat was finished"
        )
    return CheckResult(
        name=NAME,
        status="fail" if short else "pass",
        measured=_glance(lowest.m, lowest.artifact),
        bound=f"at least {share:.0%} of M running, at every M",
        reason=(
            "; ".join(_glance(point.m, point.artifact) for point in short) + ". " + _advice(short[0], limit)
            if short
            else "requests were running, not queued, at every M"
        ),
        figures={f"running_m{point.m}": point.artifact.running_mean for point in curve},
    )


def _share(point: CurvePoint) -> float:
    return (point.artifact.running_mean or 0.0) / point.m


def _glance(m: int, side: ServingFigures) -> str:
    """`M=82: 22 running, 60 waiting, KV 3% used`."""
    running = f"{side.running_mean or 0.0:.3g} running"
    # A short repeat may end between two looks at the queue; the server's own mean is over every step.
    queued = [value for value in (side.waiting_max, side.waiting_mean) if value is not None]
    waiting = f"{max(queued):.0f} waiting" if queued else "waiting not reported"
    used = "KV use not reported" if side.kv_usage_max is None else f"KV {side.kv_usage_max:.0%} used"
    return f"M={m}: {running}, {waiting}, {used}"


def _advice(point: CurvePoint, limit: int | None) -> str:
    if limit is not None and limit < point.m:
        return f"The server runs at most {limit} requests together: raise its --max-num-seqs to M."
    usage = point.artifact.kv_usage_max
    if usage is None:
        return "Look at the server's limits on running requests and on KV memory."
    if usage > 0.9:
        return "The KV cache is full: give it more memory, or validate with shorter requests."
    return "The KV cache has room, so something else caps the running requests: a limit, or a side pool."
