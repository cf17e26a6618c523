"""Whether M requests really decoded together, rather than some of them while the rest were queued.

If prompts are long and answers short, the first requests end before the last one decodes, on any server. The
number of requests that ran on the baseline therefore replaces M if it is smaller.
"""

from collections.abc import Sequence

from ..adapters.prometheus_text import total
from ..adapters.series import SCALEGATE_SERIES, Series
from ..evidence.verdict import CheckResult, CurvePoint, ServingFigures, Status

NAME = "M reached"
LEAST_OF_BASELINE = 0.5
"""The share of M that must run on the baseline; below it, a point of the curve does not measure M. For long
prompts, `pipeline/validation/servers.py` refuses a workload if less than this share can run."""


def most_running(samples: dict[str, float], series: Series = SCALEGATE_SERIES) -> int | None:
    """Return how many requests a server runs together at most, as its `/metrics` say; None if they do not
    say.
    """
    limit = total(samples, series.max_num_seqs)
    return None if limit is None else int(limit)


def check_reached(curve: Sequence[CurvePoint], share: float, limit: int | None = None) -> CheckResult:
    """Fail if the average output token of the artifact saw fewer than `share` of M requests running, or of
    the requests that ran on the baseline if they were fewer. The check is inconclusive if the baseline ran
    less than half of M.

    limit: the server's own limit on running requests, if known
    """
    bound = f"at least {share:.0%} of M running, or of what the baseline ran, at every M"
    shares = {point.m: _share(point, limit) for point in curve}
    lowest = min(curve, key=lambda point: shares[point.m], default=None)
    if lowest is None:
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no repeat was finished")
    short = [point for point in curve if shares[point.m] < share]
    far = [point for point in curve if reachable(point) < LEAST_OF_BASELINE * point.m]
    status: Status = "fail" if short else "inconclusive" if far else "pass"
    return CheckResult(
        name=NAME,
        status=status,
        measured=_glance(lowest.m, lowest.artifact),
        bound=bound,
        reason=_reason(curve, short, far, share, limit),
        figures={f"running_m{point.m}": point.artifact.running_mean for point in curve},
    )


def reachable(point: CurvePoint) -> float:
    """Return the number of requests that this workload lets decode together at M: as many as on the baseline,
    M at most.
    """
    baseline = point.baseline.running_mean
    return point.m if baseline is None else min(point.m, baseline)


def _share(point: CurvePoint, limit: int | None) -> float:
    """Return the share of the requests that could decode together; of M, if the server's own limit is below
    it.
    """
    expected = point.m if limit is not None and limit < point.m else reachable(point)
    return (point.artifact.running_mean or 0.0) / max(expected, 1.0)


def _reason(
    curve: Sequence[CurvePoint],
    short: Sequence[CurvePoint],
    far: Sequence[CurvePoint],
    share: float,
    limit: int | None,
) -> str:
    if short:
        glances = "; ".join(_glance(point.m, point.artifact) + _beside(point, share) for point in short)
        return f"{glances}. {_advice(short[0], limit)}"
    if far:
        ran = ", ".join(f"{reachable(point):.3g} of M={point.m}" for point in far)
        return (
            f"the baseline ran {ran}: requests end before the last prompts are read, so this workload does "
            "not measure that M. Ask for longer answers (--output-len) or shorter prompts (--input-len)"
        )
    fewer = [_beside(point, share) for point in curve]
    return "requests were running, not queued, at every M" + next(filter(None, reversed(fewer)), "")


def _beside(point: CurvePoint, share: float) -> str:
    """Return a sentence on the requests that ran on the baseline at M, if they were too few; otherwise
    empty.
    """
    ran = reachable(point)
    return f" (the baseline ran {ran:.3g} of M={point.m} as well)" if ran < share * point.m else ""


def _glance(m: int, side: ServingFigures) -> str:
    """Return one side's figures at one M as text: `M=82: 22 running, 60 waiting, KV 3% used`."""
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
