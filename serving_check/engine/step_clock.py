"""Where an engine's time goes: in steps, in the host's part of steps, and in idle time of the device.

Gaps between two kernels of one launch count as busy.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .request import StepTimes


class StepClock:
    """Sums since `reset`. On a GPU the clock records two events for each launch, and never waits for them.

    The host's part of a step is its time without waiting for the GPU or, on a CPU, without running the model.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self.reset()

    def reset(self) -> None:
        self._step_seconds = 0.0
        self._away_seconds = 0.0
        self._device = _DeviceClock() if self._on_gpu else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the time inside the block as one step's."""
        started = time.perf_counter()
        yield
        self._step_seconds += time.perf_counter() - started

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as waiting for the device."""
        started = time.perf_counter()
        yield
        self._away_seconds += time.perf_counter() - started

    @contextmanager
    def launch(self) -> Iterator[None]:
        """Measure a launch; on a CPU, the model's computation itself."""
        started = time.perf_counter()
        yield
        if self._device is None:
            self._away_seconds += time.perf_counter() - started
        else:
            self._device.ends()

    def device_starts(self) -> None:
        """Note that the first operation of a launch follows, after the host's preparations."""
        if self._device is not None:
            self._device.starts()

    def rest(self) -> None:
        """Note that no requests are left. Until the next request, the device does not count as idle."""
        if self._device is not None:
            self._device.rest()

    def times(self) -> StepTimes:
        host = self._step_seconds - self._away_seconds
        if self._device is None:
            return StepTimes(self._step_seconds, host)
        self._device.read()
        return StepTimes(self._step_seconds, host, self._device.busy_seconds, self._device.idle_seconds)


class _DeviceClock:
    """Times launches on the current stream with pairs of events, which are read once they have completed."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0
        self._started: torch.cuda.Event | None = None
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._last_end: torch.cuda.Event | None = None

    def starts(self) -> None:
        if self._started is None:
            self._started = _event()

    def ends(self) -> None:
        if self._started is not None:
            self._spans.append((self._started, _event()))
            self._started = None
        self.read()

    def read(self) -> None:
        while self._spans and self._spans[0][1].query():
            start, end = self._spans.popleft()
            if self._last_end is not None:
                self.idle_seconds += self._last_end.elapsed_time(start) / 1000
            self.busy_seconds += start.elapsed_time(end) / 1000
            self._last_end = end

    def rest(self) -> None:
        if self._spans:
            self._spans[-1][1].synchronize()
        self.read()
        self._last_end = None


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
