"""What `/metrics` says, under vLLM's Prometheus names; ours only where vLLM has none.

Counted in plain numbers and turned into Prometheus' objects when somebody looks: a lock and a label look-up
for every token would be felt at 20,000 tokens a second.
"""

import bisect
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..engine.request import EngineStats

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
    """The numbers of one server."""

    def __init__(self) -> None:
        self.model_name = ""
        self._stats = EngineStats(0, 0, 0.0, 0, 0, 0, 0)
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
        """For prometheus_client: everything, as of now."""
        stats = self._stats
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge(
            "vllm:num_requests_waiting", "Requests waiting for pages or a place.", stats.waiting
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "KV pages in use, 1 is all.", stats.kv_cache_usage)
        yield self._gauge("scalegate:engine_step_seconds", "Time the last step took.", stats.step_seconds)
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
        yield self._histogram("vllm:time_to_first_token_seconds", "Time to the first token.", self._ttft)
        yield self._histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", self._itl)
        yield self._histogram("vllm:e2e_request_latency_seconds", "Time from arrival to end.", self._e2e)

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
