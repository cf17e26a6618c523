"""A server's own counts of its work during one run of a workload, from `/metrics` before and after it.

Clients' figures and sampled figures are in `spec.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..adapters.prometheus_text import by_label, total
from ..adapters.series import SCALEGATE_SERIES, Series


@dataclass(frozen=True)
class EngineWork:
    """Counts and sums over one run, or over several runs added up; None if the server does not say."""

    steps: float | None = None
    waiting_request_steps: float | None = None
    """Number of waiting requests, summed over steps."""
    step_seconds: float | None = None
    host_seconds: float | None = None
    """Seconds of steps, without waiting for the GPU or, on a CPU, without running the model."""
    device_busy_seconds: float | None = None
    device_idle_seconds: float | None = None
    generation_tokens: float | None = None

    @classmethod
    def between(
        cls, before: dict[str, float], after: dict[str, float], series: Series = SCALEGATE_SERIES
    ) -> "EngineWork":
        return cls(
            steps=difference(before, after, series.steps_by_running),
            waiting_request_steps=difference(before, after, series.waiting_request_steps),
            step_seconds=difference(before, after, series.step_seconds),
            host_seconds=difference(before, after, series.host_seconds),
            device_busy_seconds=difference(before, after, series.device_busy_seconds),
            device_idle_seconds=difference(before, after, series.device_idle_seconds),
            generation_tokens=difference(before, after, series.generation_tokens),
        )

    @classmethod
    def sum(cls, works: Iterable["EngineWork"]) -> "EngineWork":
        """Return the sum of each figure over all runs. A sum is None if any run lacks the figure: a share of
        some runs would look like a share of all.
        """
        listed = list(works)
        return cls(
            **{field.name: _sum(getattr(work, field.name) for work in listed) for field in fields(cls)}
        )

    @property
    def waiting_mean(self) -> float | None:
        """Return the mean number of waiting requests over steps."""
        return _over(self.waiting_request_steps, self.steps)

    @property
    def step_ms(self) -> float | None:
        return _over(self.step_seconds, self.steps, 1000.0)

    @property
    def host_ms(self) -> float | None:
        """Return the host's milliseconds in a step, on average."""
        return _over(self.host_seconds, self.steps, 1000.0)

    @property
    def device_idle_share(self) -> float | None:
        """Return the share of the time with requests to serve, 0 to 1."""
        if self.device_busy_seconds is None or self.device_idle_seconds is None:
            return None
        return _over(self.device_idle_seconds, self.device_busy_seconds + self.device_idle_seconds)


def difference(before: dict[str, float], after: dict[str, float], series: str | None) -> float | None:
    """Return the rise of a counter; None if the server does not have it."""
    later = total(after, series)
    return None if later is None else later - (total(before, series) or 0.0)


def steps_by_running(
    before: dict[str, float], after: dict[str, float], series: Series
) -> dict[int, int] | None:
    """Return the number of decode steps by the number of requests in them; None if the server does not
    say.
    """
    counted = by_label(after, series.steps_by_running, "running")
    if not counted:
        return None
    earlier = by_label(before, series.steps_by_running, "running")
    steps = {int(running): int(count - earlier.get(running, 0)) for running, count in counted.items()}
    return {running: count for running, count in sorted(steps.items()) if count > 0 and running > 0}


def preemptions(before: dict[str, float], after: dict[str, float], series: Series) -> int | None:
    """Return how many requests were preempted; None if the server does not say."""
    count = difference(before, after, series.preemptions)
    if count is None and series.preemptions_appear_late and total(after, series.running) is not None:
        return 0
    return None if count is None else int(count)


def _sum(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) if known and len(known) == len(listed) else None


def _over(amount: float | None, count: float | None, unit: float = 1.0) -> float | None:
    return None if amount is None or not count else amount * unit / count
