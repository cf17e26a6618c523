"""What the interleaved repeats gave at one M, on both sides, and the figures that checks and report read.

Arithmetic on their results only; running them is `gate.py`, judging them is `checks/`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from .statistics import Decision, block_log_ratio
from .verdict import CurvePoint, ServingFigures, finite
from .workload import RequestRecord, WorkloadResult, percentile
from .workload.engine_work import EngineWork

SLOWEST = 95
"""The percentile of a repeat's requests that stands for its slowest: one straggler is not yet a pattern."""


@dataclass
class Block:
    """Four repeats close together in time: two of the artifact, two of the baseline."""

    artifact: list[WorkloadResult] = field(default_factory=list)
    baseline: list[WorkloadResult] = field(default_factory=list)

    def log_ratio(self, figure: Callable[[WorkloadResult], float | None]) -> float | None:
        """The block's log ratio of `figure`; None where a repeat has none, or the block was broken off."""
        artifact = [figure(result) or 0.0 for result in self.artifact]
        baseline = [figure(result) or 0.0 for result in self.baseline]
        if not artifact or not baseline or min(artifact + baseline) <= 0:
            return None
        return block_log_ratio(artifact, baseline)


@dataclass
class MeasuredM:
    """Every measured block at one M, oldest first."""

    m: int
    blocks: list[Block] = field(default_factory=list)

    @property
    def artifact(self) -> list[WorkloadResult]:
        return [result for block in self.blocks for result in block.artifact]

    @property
    def baseline(self) -> list[WorkloadResult]:
        return [result for block in self.blocks for result in block.baseline]

    def log_ratios(self, figure: Callable[[WorkloadResult], float | None]) -> list[float]:
        return [ratio for block in self.blocks if (ratio := block.log_ratio(figure)) is not None]

    def curve_point(self, decision: Decision) -> CurvePoint:
        return CurvePoint(
            m=self.m,
            artifact=serving_figures(self.artifact),
            baseline=serving_figures(self.baseline),
            ratio=finite(decision.ratio),
            ratio_low=finite(decision.low),
            ratio_high=finite(decision.high),
            status=decision.status,
            log_ratios=tuple(self.log_ratios(output_throughput)),
        )


def output_throughput(result: WorkloadResult) -> float:
    return result.output_throughput


def slowest_tpot(result: WorkloadResult) -> float | None:
    return percentile(result.tpots, SLOWEST)


def slowest_ttft(result: WorkloadResult) -> float | None:
    return percentile(result.ttfts, SLOWEST)


def serving_figures(results: Sequence[WorkloadResult]) -> ServingFigures:
    """One side at one M: medians over repeats, percentiles over requests, extremes of what was sampled."""
    ttfts = [value * 1000 for result in results for value in result.ttfts]
    tpots = [value * 1000 for result in results for value in result.tpots]
    preemptions = [result.preemptions for result in results if result.preemptions is not None]
    engine = EngineWork.sum(result.engine for result in results)
    return ServingFigures(
        output_throughput=median(result.output_throughput for result in results),
        repeats=tuple(result.output_throughput for result in results),
        ttft_p50_ms=percentile(ttfts, 50),
        ttft_p99_ms=percentile(ttfts, 99),
        tpot_p50_ms=percentile(tpots, 50),
        tpot_p99_ms=percentile(tpots, 99),
        running_mean=median(decoding_together(result) for result in results),
        waiting_max=_largest([result.waiting_max for result in results]),
        kv_usage_max=_largest([sample.kv_cache_usage for result in results for sample in result.samples]),
        preemptions=sum(preemptions) if preemptions else None,
        requests=sum(len(result.requests) for result in results),
        failed_requests=sum(len(result.errors) for result in results),
        waiting_mean=engine.waiting_mean,
        step_ms=engine.step_ms,
        host_ms=engine.host_ms,
        device_idle_share=engine.device_idle_share,
    )


def decoding_together(result: WorkloadResult) -> float:
    """How many requests decoded together, as the average output token saw it.

    By the server's own count of its steps; where it keeps none, by the overlap of the streams that clients
    received, which needs nothing from the server. Queued requests count in neither.
    """
    if result.steps_by_running:
        tokens = sum(running * steps for running, steps in result.steps_by_running.items())
        return sum(running**2 * steps for running, steps in result.steps_by_running.items()) / tokens
    return _overlap(result.requests)


def _overlap(requests: Sequence[RequestRecord]) -> float:
    """Mean number of streams between first chunk and end, weighted by that number."""
    events: list[tuple[float, int]] = []
    for record in requests:
        if record.error is None and record.ttft is not None:
            events += [(record.start + record.ttft, 1), (record.start + record.e2el, -1)]
    running, then, weighted, total = 0, -math.inf, 0.0, 0.0
    for now, change in sorted(events):
        if running:
            weighted += running**2 * (now - then)
            total += running * (now - then)
        running, then = running + change, now
    return weighted / total if total else 0.0


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
