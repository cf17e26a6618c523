"""Whether the servers leave one another alone: a server that computes while it is idle slows the other one.

Each server is measured with the other one stopped. The comparison decides nothing if the servers disturb each
other: if the ratio of throughput is then surely another one, or, on a CPU, if an idle server takes the other
server's time. The comparison decides nothing either if the servers may run on different cores. CPU time of
other processes is reported and decides nothing: repeats of both sides take turns, and intervals get wider.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..evidence.measurement import MeasuredM, Repeat, output_throughput
from ..evidence.undisturbed import AloneFigures, ServerCores
from ..evidence.verdict import CheckResult, Status
from ..statistics.trimmed_mean import student_t_quantile, winsorized

NAME = "undisturbed"
ERROR = 0.005
"""The chance, on either side, that the limits do not contain the true difference."""
LEAST_DIFFERENCE = 0.03
"""The least relative difference between the throughput ratio of servers alone and side by side that counts.
Within one verdict, warm-up and the machine's drift cause less than this."""
LEAST_CPU = 0.05
"""The share of the cores' time that one idle server may take beyond what the other one takes. A server that
computes on all cores loses at most this share of its throughput; larger losses show in the ratio."""


@dataclass(frozen=True)
class _Difference:
    """The difference between the log throughput ratio of servers side by side and that of servers alone."""

    centre: float
    low: float
    high: float


def check_undisturbed(alone: AloneFigures | None, measured: Sequence[MeasuredM]) -> CheckResult:
    """The check is inconclusive if a server surely disturbs the other server, and unknown if the servers
    could not be stopped.
    """
    bound = f"a ratio of throughput within {LEAST_DIFFERENCE:.0%} of that with the other server stopped"
    if alone is not None and alone.on_cpu:
        bound = f"at most {LEAST_CPU:.0%} of the CPU taken while idle"
    beside = next((level for level in measured if alone is not None and level.m == alone.blocks.m), None)
    difference = None
    if alone is not None and beside is not None:
        difference = _difference(
            beside.log_ratios(output_throughput), alone.blocks.log_ratios(output_throughput)
        )
    if alone is None or beside is None or difference is None:
        reason = "the servers were not started here, so none could be stopped while the other was measured"
        return CheckResult(NAME, "unknown", "not known", bound, reason)
    of_artifact = _idle_cpu(measured, alone.cores, artifacts=True)
    of_baseline = _idle_cpu(measured, alone.cores, artifacts=False)
    disturbs = _who(difference, of_artifact, of_baseline, alone.on_cpu)
    uses = _uses(of_artifact, of_baseline, alone.gpu_use)
    others, stolen = (_share(measured, alone.cores, figure) for figure in (others_cpu, stolen_cpu))
    uses += _neighbours(others, stolen)
    apart = _apart(alone)
    status: Status = "pass" if disturbs is None and apart is None else "inconclusive"
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"{_shown(difference)} beside one another at M={beside.m}; {uses}",
        bound=bound,
        reason=apart or _reason(disturbs, uses),
        figures={
            "difference": math.expm1(difference.centre),
            "difference_low": math.expm1(difference.low),
            "difference_high": math.expm1(difference.high),
            "artifact_idle_cpu": of_artifact,
            "baseline_idle_cpu": of_baseline,
            "gpu_use": alone.gpu_use,
            "others_cpu": others,
            "stolen_cpu": stolen,
            "artifact_threads": _threads(alone.artifact_cores),
            "baseline_threads": _threads(alone.baseline_cores),
        },
    )


def _difference(beside: Sequence[float], alone: Sequence[float]) -> _Difference | None:
    """Return Student's limits for two samples of equal variance; None with fewer than two values of
    either.
    """
    if min(len(beside), len(alone)) < 2:
        return None
    samples = [winsorized(values) for values in (beside, alone)]
    means = [math.fsum(values) / len(values) for values in samples]
    squares = math.fsum(
        (value - mean) ** 2 for values, mean in zip(samples, means, strict=True) for value in values
    )
    freedom = len(beside) + len(alone) - 2
    error = math.sqrt(squares / freedom * (1 / len(beside) + 1 / len(alone)))
    half = student_t_quantile(ERROR, freedom) * error
    centre = means[0] - means[1]
    return _Difference(centre, centre - half, centre + half)


def _idle_cpu(measured: Sequence[MeasuredM], cores: int, artifacts: bool) -> float | None:
    """Return the share of the cores' time that a server took during the other's repeats.

    artifacts: the artifact's server, rather than the baseline's
    """
    repeats: list[Repeat] = [
        repeat for level in measured for repeat in (level.baseline if artifacts else level.artifact)
    ]
    known = [repeat for repeat in repeats if repeat.idle_cpu_seconds is not None]
    seconds = math.fsum(repeat.duration for repeat in known)
    if not seconds:
        return None
    return math.fsum(repeat.idle_cpu_seconds or 0.0 for repeat in known) / (seconds * cores)


def others_cpu(repeat: Repeat) -> float | None:
    return repeat.others_cpu_seconds


def stolen_cpu(repeat: Repeat) -> float | None:
    return repeat.stolen_seconds


def _share(
    measured: Sequence[MeasuredM], cores: int, seconds_of: Callable[[Repeat], float | None]
) -> float | None:
    """Return the share of the cores' time in all repeats; None if it is not known."""
    known = [
        (seconds, repeat.duration)
        for level in measured
        for repeat in (*level.artifact, *level.baseline)
        if (seconds := seconds_of(repeat)) is not None
    ]
    passed = math.fsum(duration for _, duration in known)
    return math.fsum(seconds for seconds, _ in known) / (passed * cores) if passed else None


def _neighbours(others: float | None, stolen: float | None) -> str:
    """Return a sentence on other processes and other machines; empty if they took too little to matter."""
    told = ""
    if others is not None and others > LEAST_CPU:
        told += f"; other processes took {others:.1%} of the CPU meanwhile"
    if stolen is not None and stolen > LEAST_CPU:
        told += f"; a hypervisor took {stolen:.1%} of it"
    return told


def _apart(alone: AloneFigures) -> str | None:
    """Return why the servers do not run in the same place, if they do not, on a CPU."""
    artifact, baseline = alone.artifact_cores, alone.baseline_cores
    if not alone.on_cpu or artifact is None or baseline is None or artifact.cores == baseline.cores:
        return None
    return (
        f"the artifact's server may run on the cores {_listed(artifact.cores)}, the baseline's on "
        f"{_listed(baseline.cores)}: start both with the same affinity (taskset)"
    )


def _threads(place: ServerCores | None) -> int | None:
    return None if place is None else place.threads


def _listed(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))


def _who(
    difference: _Difference, of_artifact: float | None, of_baseline: float | None, on_cpu: bool
) -> str | None:
    """Return whose server disturbs the other one, if either surely does.

    On a CPU, the CPU time of idle servers shows a disturbance. A ratio that was measured a minute later need
    not be the same on a CPU: other processes use the same cores.
    """
    if on_cpu and of_artifact is not None and of_baseline is not None:
        taken, least = of_artifact - of_baseline, LEAST_CPU
        return "artifact" if taken > least else "baseline" if taken < -least else None
    if difference.low > math.log1p(LEAST_DIFFERENCE):
        return "artifact"
    if difference.high < -math.log1p(LEAST_DIFFERENCE):
        return "baseline"
    return None


def _reason(disturbs: str | None, uses: str) -> str:
    if disturbs is None:
        return "neither server is slower beside the other one than alone"
    other = "baseline" if disturbs == "artifact" else "artifact"
    return (
        f"the {disturbs}'s server takes from the {other}'s while it has no request itself: {uses}. Find out "
        "what it does then, or give each side a machine of its own"
    )


def _uses(of_artifact: float | None, of_baseline: float | None, gpu: float | None) -> str:
    parts = [
        f"the {side}'s server took {share:.1%} of the CPU while idle"
        for side, share in (("artifact", of_artifact), ("baseline", of_baseline))
        if share is not None
    ]
    parts += [] if gpu is None else [f"the GPUs were busy {gpu:.0%} of the time without any request"]
    return ", ".join(parts) or "what they took while idle is not known"


def _shown(difference: _Difference) -> str:
    low, centre, high = (
        f"{math.expm1(value):+.1%}" for value in (difference.low, difference.centre, difference.high)
    )
    return f"ratio {centre} [{low}, {high}]"
