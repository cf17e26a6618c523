"""The verdict in one sentence, and the check that decided it: a reader sees these first.

Nothing is judged here: status, checks and curve are the verdict's own.
"""

from dataclasses import dataclass

from ...serving_check.evidence.verdict import CheckResult, CurvePoint, Verdict

THROUGHPUT = "throughput"
KEY_CHECKS = (THROUGHPUT, "quality", "latency", "weights")
"""The checks that the report of a pass shows first."""


@dataclass(frozen=True)
class Headline:
    """The top of the report page."""

    sentence: str
    score: str
    """How many of the decided checks passed, and how many checks are unknown."""
    first_failure: CheckResult | None
    """The first check that failed; if none failed, the first that could not be decided."""
    other_failures: list[CheckResult]
    key_checks: list[CheckResult]


def headline_of(verdict: Verdict) -> Headline:
    failures = sorted(verdict.failures, key=lambda check: check.status != "fail")
    first = failures[0] if failures else None
    decided = [check for check in verdict.checks if check.status != "unknown"]
    passed = sum(check.status == "pass" for check in decided)
    unknown = len(verdict.checks) - len(decided)
    return Headline(
        sentence=_sentence(verdict, first),
        score=f"{passed} of {len(decided)} checks passed{f', {unknown} unknown' if unknown else ''}",
        first_failure=first,
        other_failures=failures[1:],
        key_checks=[check for name in KEY_CHECKS for check in verdict.checks if check.name == name],
    )


def _sentence(verdict: Verdict, first: CheckResult | None) -> str:
    ours, base = verdict.artifact.name, verdict.baseline.name
    worst = _worst(verdict)
    floor = f"{verdict.bounds.throughput_floor:g}×"
    if verdict.status == "pass":
        if verdict.speed_not_judged:
            return f"{ours} passes every check beside {base} but those of speed, which was not judged."
        if worst is None:
            return f"{ours} keeps up with {base}."
        return (
            f"{ours} keeps up with {base}: at least {worst.ratio:.2f}× the throughput "
            f"{_load(verdict)} (floor {floor})."
        )
    if verdict.status == "fail" and first is not None:
        if first.name == THROUGHPUT and worst is not None:
            return (
                f"{ours} falls behind {base}: {worst.ratio:.2f}× the throughput "
                f"with {_requests(worst.m)} at once (floor {floor})."
            )
        return f"{ours} fails the check “{first.name}”: {first.measured}."
    if first is not None:
        return f"{ours} is neither passed nor failed: the check “{first.name}” could not be decided."
    return f"{ours} is neither passed nor failed: nothing was measured."


def _worst(verdict: Verdict) -> CurvePoint | None:
    measured = [point for point in verdict.curve if point.ratio is not None]
    return min(measured, key=lambda point: point.ratio or 0.0, default=None)


def _load(verdict: Verdict) -> str:
    """Return the load as text: `with 1 to 32 requests at once`."""
    ms = [point.m for point in verdict.curve]
    requests = f"{min(ms)} to {_requests(max(ms))}" if min(ms) < max(ms) else _requests(ms[0])
    return f"with {requests} at once"


def _requests(m: int) -> str:
    return "1 request" if m == 1 else f"{m} requests"
