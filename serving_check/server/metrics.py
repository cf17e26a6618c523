"""The contents of `/metrics`, under vLLM's Prometheus names; our own names only if vLLM has none.

Plain numbers are counted, and become Prometheus' objects only when `/metrics` is read: a lock and a label
look-up for every token would be felt at 20,000 tokens a second.
"""

import bisect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..adapters.process_memory import resident_bytes
from ..engine.jit_monitor import JitEvent, Mode
from ..engine.request import EngineCapacity, EngineStats

TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

MOST_COMPILATIONS = 100
"""The most different compilations in the metrics: a kernel that compiles at every step must not fill the
memory."""


class Histogram:
    """Observations by bucket; `bounds` are upper ends, inclusive."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        buckets, count = [], 0
        for bound, here in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            count += here
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(count)))
        return buckets


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.model_name = ""
        self.capacity: EngineCapacity | None = None
        self.jit_monitor: Mode = "off"
        self.processes: Callable[[], Mapping[str, Sequence[int]]] = lambda: {"server": [os.getpid()]}
        """The ids of the server's processes, by what they do."""
        self._stats = EngineStats(0, 0, 0.0, 0, 0, 0, 0)
        self._compilations: Counter[JitEvent] = Counter()
        self._steps_by_running: Counter[int] = Counter()
        self._finished: Counter[str] = Counter()
        self._ttft = Histogram(TTFT_BUCKETS)
        self._itl = Histogram(ITL_BUCKETS)
        self._e2e = Histogram(E2E_BUCKETS)
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]

    def observe_stats(self, stats: EngineStats) -> None:
        self._stats = stats
        self._steps_by_running.update(stats.running_by_step)
        for event in stats.compilations:
            known = event in self._compilations or len(self._compilations) < MOST_COMPILATIONS
            self._compilations[event if known else JitEvent(event.kind, "others")] += 1

    def observe_tokens(self, now: float, submitted: float, last_token: float | None) -> None:
        if last_token is None:
            self._ttft.observe(now - submitted)
        else:
            self._itl.observe(now - last_token)

    def finished(self, reason: str, seconds: float | None = None) -> None:
        self._finished[reason] += 1
        if seconds is not None:
            self._e2e.observe(seconds)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all current figures, in the form of prometheus_client."""
        stats = self._stats
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge(
            "vllm:num_requests_waiting", "Requests waiting for pages or a place.", stats.waiting
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "KV pages in use, 1 is all.", stats.kv_cache_usage)
        yield self._counter("vllm:num_preemptions", "Requests put back to wait for pages.", stats.preemptions)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._by_label(
            "vllm:request_success", "Requests ended, by reason.", "finished_reason", dict(self._finished)
        )
        yield self._by_label(
            "scalegate:engine_steps",
            "Steps by the number of requests that decoded in them: what M really was.",
            "running",
            {str(running): count for running, count in sorted(self._steps_by_running.items())},
        )
        yield self._counter(
            "scalegate:waiting_request_steps",
            "Requests that waited, summed over steps: divided by all steps, how many wait.",
            stats.waiting_by_step,
        )
        yield from self._times(stats)
        yield from self._fixed()
        yield self._compiled()
        yield self._memory()
        yield self._histogram("vllm:time_to_first_token_seconds", "Time to the first token.", self._ttft)
        yield self._histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", self._itl)
        yield self._histogram("vllm:e2e_request_latency_seconds", "Time from arrival to end.", self._e2e)

    def _times(self, stats: EngineStats) -> Iterator[Metric]:
        times = stats.times
        yield self._counter("scalegate:engine_step_seconds", "Time in engine steps.", times.step_seconds)
        yield self._counter(
            "scalegate:engine_host_seconds",
            "Of engine steps, time on the host: not waiting for the GPU, nor (on a CPU) in the model.",
            times.host_seconds,
        )
        if times.device_busy_seconds is not None and times.device_idle_seconds is not None:
            yield self._counter(
                "scalegate:device_busy_seconds", "Time the GPU had work.", times.device_busy_seconds
            )
            yield self._counter(
                "scalegate:device_idle_seconds",
                "Time between two launches with the GPU idle and requests to serve.",
                times.device_idle_seconds,
            )

    def _fixed(self) -> Iterator[Metric]:
        """Yield the facts that do not change while the server lives."""
        if self.capacity is None:
            return
        yield self._gauge(
            "scalegate:max_num_seqs", "The most requests that run together.", self.capacity.max_num_seqs
        )
        yield self._gauge(
            "scalegate:kv_cache_tokens", "Tokens the KV pool holds.", self.capacity.kv_cache_tokens
        )
        pool = {
            "model_name": self.model_name,
            "block_size": str(self.capacity.page_size),
            "num_gpu_blocks": str(self.capacity.kv_cache_pages),
            "cache_dtype": self.capacity.kv_cache_dtype,
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool: its pages and format.", labels=list(pool)
        )
        info.add_metric(list(pool.values()), 1)
        yield info
        yield self._request_bytes(self.capacity)
        packed = GaugeMetricFamily(
            "scalegate:packed_layers",
            "Quantized linear layers, by the device, the layout their weights are packed in and their shape.",
            labels=["model_name", "device", "layout", "shape"],
        )
        device = self.capacity.device
        packed.add_metric([self.model_name, device, "", ""], 0)
        for name, count in self.capacity.packed_layers.items():
            packed.add_metric([self.model_name, device, *name.split()], count)
        yield packed
        emulated = GaugeMetricFamily(
            "scalegate:emulated_products",
            "Products whose inputs are rounded to a format and multiplied in 16 or 32 bits, by that format "
            "and the hardware that multiplies it.",
            labels=["model_name", "inputs", "hardware"],
        )
        emulated.add_metric([self.model_name, "", ""], 0)
        for (inputs, hardware), count in self.capacity.emulated_inputs.items():
            emulated.add_metric([self.model_name, inputs, hardware], count)
        yield emulated

    def _request_bytes(self, capacity: EngineCapacity) -> Metric:
        family = GaugeMetricFamily(
            "scalegate:request_bytes",
            "Bytes kept of each request: a page of keys and values, what it has besides pages, its states.",
            labels=["model_name", "kept", "format", "dtype"],
        )
        family.add_metric([self.model_name, "page", capacity.kv_cache_dtype, ""], capacity.page_bytes)
        family.add_metric([self.model_name, "row", capacity.kv_cache_dtype, ""], capacity.row_bytes)
        for name, size in capacity.state_bytes.items():
            family.add_metric([self.model_name, "state", *name.split()], size)
        return family

    def _compiled(self) -> Metric:
        """Return the counts of compilations. Without a monitor there is no sample, which a reader can tell
        from a zero."""
        family = CounterMetricFamily(
            "scalegate:compilations",
            "Compilations and graph captures after warm-up: each is a pause that requests feel.",
            labels=["model_name", "kind", "kernel", "key"],
        )
        if self.jit_monitor != "off":
            family.add_metric([self.model_name, "", "", ""], 0)
        for event, count in self._compilations.items():
            family.add_metric([self.model_name, event.kind, event.name, event.key], count)
        return family

    def _memory(self) -> Metric:
        family = GaugeMetricFamily(
            "process_resident_memory_bytes",
            "Resident memory, by what the processes do; pages that they share count for each of them.",
            labels=["model_name", "process"],
        )
        for name, pids in self.processes().items():
            sizes = [size for pid in pids if (size := resident_bytes(pid)) is not None]
            if sizes:
                family.add_metric([self.model_name, name], sum(sizes))
        return family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _by_label(self, name: str, help: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, help, labels=["model_name", label])
        for value, count in values.items():
            family.add_metric([self.model_name, value], count)
        return family

    def _histogram(self, name: str, help: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, help, labels=["model_name"])
        family.add_metric([self.model_name], histogram.cumulative(), histogram.sum)
        return family
