"""Sends requests at their planned times, whatever has become of earlier ones, and records each.

Not for what is sent (`use_plan.py`), nor for a fixed number of requests at a time (`generator.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..adapters.endpoint import Endpoint
from .spec import RequestRecord
from .use_plan import PlannedRequest


@dataclass(frozen=True)
class OpenLoopResult:
    """What came of one open loop."""

    began: float
    """When the clock of the records was zero, in seconds of `time.perf_counter`."""
    duration: float
    """Seconds from the first send to the last end."""
    requests: tuple[PlannedRequest, ...]
    records: tuple[RequestRecord, ...]
    """One for each of `requests`, in their order, with its prompt and its answer."""
    steps_by_running: dict[int, int] | None
    """How many decode steps ran with how many requests in them; None where the server does not say."""
    generation_tokens: float | None
    """By how much the server's own counter of generated tokens rose; None where it has none."""
    preemptions: int | None


def run_open_loop(
    endpoint: Endpoint, requests: Sequence[PlannedRequest], request_timeout: float
) -> OpenLoopResult:
    """Send `requests` to `endpoint` and wait for all answers; a failed one is recorded, not raised."""
    raise NotImplementedError
