"""Whether every request of the workload was answered in full."""

from collections import Counter
from collections.abc import Sequence

from ..evidence.in_use import BlockInUse, SideInUse
from ..evidence.measurement import MeasuredM, Repeat
from ..evidence.verdict import CheckResult

NAME = "no failed requests"
SHOWN = 3


def check_failures(measured: Sequence[MeasuredM], in_use: Sequence[BlockInUse] = ()) -> CheckResult:
    """Fail if any of the artifact's requests failed; inconclusive if only other servers' requests did."""
    artifact = _errors([(level.m, result) for level in measured for result in level.artifact])
    baseline = _errors([(level.m, result) for level in measured for result in level.baseline])
    artifact += _errors_in_use([block.artifact for block in in_use])
    baseline += _errors_in_use([block.baseline for block in in_use])
    rival = _errors([(level.m, result) for level in measured for result in level.rival])
    requests = sum(result.requests for level in measured for result in level.artifact)
    requests += sum(block.requests for block in in_use if block.artifact is not None)
    failed, baseline_failed, rival_failed = artifact.total(), baseline.total(), rival.total()
    if failed:
        reason = "the artifact's server: " + _most_common(artifact)
    elif baseline_failed:
        reason = "the baseline's server, so there is nothing to compare with: " + _most_common(baseline)
    elif rival_failed:
        reason = "the rival's server, so there is nothing to compare with: " + _most_common(rival)
    else:
        reason = "every request on every server returned all its tokens"
    return CheckResult(
        name=NAME,
        status="fail"
        if failed
        else "inconclusive"
        if baseline_failed or rival_failed or not requests
        else "pass",
        measured=f"{failed} of {requests} requests failed",
        bound="none",
        reason=reason,
        figures={"requests": requests, "failed": failed, "baseline_failed": baseline_failed},
    )


def _errors(results: list[tuple[int, Repeat]]) -> Counter[str]:
    return Counter(f"at M={m}: {error}" for m, result in results for error in result.errors)


def _errors_in_use(sides: Sequence[SideInUse | None]) -> Counter[str]:
    return Counter(f"in use: {error}" for side in sides if side is not None for error in side.errors)


def _most_common(errors: Counter[str]) -> str:
    return "; ".join(f"{error} ({count}×)" for error, count in errors.most_common(SHOWN))
