"""Times several ways of doing the same thing fairly: in turn, in one run, after a warm-up.

On CUDA the calls run inside CUDA graphs, as in a decode step, and the result is the median. On a CPU the
result is the fastest sample, itself a mean over many calls: other processes can only add time, and on a busy
machine they add it to most samples. Deciding anything by the results is left to `choose.py`.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[int], object]
"""A function of i that does the work once, on the i-th copy of the weights."""

HOPELESS = 4.0
"""A contestant this many times slower than the first is timed less often: its exact time does not matter."""
HOPELESS_SAMPLES = 4


@dataclass(frozen=True)
class TimingBudget:
    """How long to time: more samples give steadier results."""

    samples: int = 32
    sample_seconds: float = 0.0005
    """A sample repeats a short call for about this long, and stops after ten times as long."""
    seconds: float = 1.0
    """After this time no new round of samples begins, except for the first HOPELESS_SAMPLES rounds."""
    warmup_calls: int = 3


def interleaved_microseconds(
    calls: Mapping[str, Call],
    copies: int,
    device: torch.device,
    budget: TimingBudget,
    on_failure: Callable[[str, Exception], object] | None = None,
) -> dict[str, float]:
    """Return the microseconds of one call of each contestant, all sampled in turn in one run.

    Every other contestant is compared with the first one. Every other round runs in reverse order, so that no
    contestant always follows the same one.

    on_failure: called for a contestant that raises in its warm-up; the others go on without it. If the first
                contestant raises, so does this function
    """
    make = _GraphContestant if device.type == "cuda" else _CpuContestant
    reference = next(iter(calls))
    contestants: dict[str, _GraphContestant | _CpuContestant] = {}
    for name, call in calls.items():
        try:
            contestants[name] = make(call, copies, budget)
        except Exception as error:
            if name == reference or on_failure is None:
                raise
            on_failure(name, error)
    names = list(contestants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    for turn in range(budget.samples):
        if turn >= HOPELESS_SAMPLES:
            if time.perf_counter() - started > budget.seconds:
                break
            names = [name for name in names if min(samples[name]) <= HOPELESS * min(samples[reference])]
        for name in names if turn % 2 == 0 else reversed(names):
            samples[name].append(contestants[name].sample())
    figure = statistics.median if device.type == "cuda" else min
    return {name: figure(seconds) * 1e6 for name, seconds in samples.items()}


class _CpuContestant:
    """Repeats a call, copy after copy, long enough to be timed."""

    def __init__(self, call: Call, copies: int, budget: TimingBudget):
        self.call = call
        self.copies = copies
        self.repeats = 1
        self.longest = 10 * budget.sample_seconds
        for copy in range(min(copies, budget.warmup_calls)):
            call(copy)
        once = self.sample()
        self.repeats = max(1, round(budget.sample_seconds / max(once, 1e-9)))

    def sample(self) -> float:
        """Return the seconds of one call, averaged over the repeats."""
        call, copies, clock = self.call, self.copies, time.perf_counter
        start = clock()
        deadline = start + self.longest
        for repeat in range(self.repeats):
            call(repeat % copies)
            now = clock()
            if now > deadline:
                break
        return (now - start) / (repeat + 1)


class _GraphContestant:
    """A CUDA graph that runs the call on every copy of the weights in turn; a slow call runs only a few
    times.
    """

    MIN_CALLS = 16
    SLOW_CALLS = 8

    def __init__(self, call: Call, copies: int, budget: TimingBudget):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Compilation and autotuning happen here, outside the capture.
            for _ in range(budget.warmup_calls):
                call(0)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call(0)
            end.record()
        end.synchronize()
        # A slow call: neither its launch nor the content of the caches matters for its time.
        is_slow = start.elapsed_time(end) / 1e3 > 10 * budget.sample_seconds / self.SLOW_CALLS
        self.calls = self.SLOW_CALLS if is_slow else copies * -(-self.MIN_CALLS // copies)
        self.graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self.graph):
                for repeat in range(self.calls):
                    call(repeat % copies)
        except Exception:
            # A capture that fails leaves its own stream as the current one.
            torch.cuda.set_stream(current)
            raise
        self.graph.replay()
        torch.cuda.synchronize()

    def sample(self) -> float:
        """Return the seconds of one call, averaged over the graph."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.calls
