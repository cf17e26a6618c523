"""Load results and verdicts made of plain numbers, for tests of the gate that need no server."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from scalegate.serving_check.engines import Endpoint
from scalegate.serving_check.environment import describe_environment
from scalegate.serving_check.measurement import Block, MeasuredM
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.statistics import SequentialTest, decide
from scalegate.serving_check.verdict import CheckResult, Subject, Verdict, overall_status
from scalegate.serving_check.workload import MetricsSample, RequestRecord, WorkloadResult, WorkloadSpec

ARTIFACT = Endpoint("http://artifact", "artifact")
BASELINE = Endpoint("http://baseline", "baseline")


def load_result(
    m: int, tokens_per_second: float, *, ttft: float = 0.01, running: int | None = None, output_len: int = 64
) -> WorkloadResult:
    """What a server gives that decodes `running` requests (all M unless told) together at this throughput."""
    running = running or m
    duration = m * output_len / tokens_per_second
    waves = math.ceil(m / running)
    requests = tuple(
        RequestRecord(
            start=0.0,
            ttft=ttft + (index // running) * duration / waves,
            itls=(),
            e2el=(index // running + 1) * duration / waves,
            output_tokens=output_len,
            prompt_tokens=8,
        )
        for index in range(m)
    )
    return WorkloadResult(
        spec=WorkloadSpec(m=m, num_requests=m, input_len=8, output_len=output_len),
        duration=duration,
        requests=requests,
        samples=(MetricsSample(duration / 2, running, m - running, 0.03),),
        steps_by_running={running: output_len * waves},
        preemptions=0,
    )


def simulated_run(
    ratio: Callable[[int], float], noise: float = 0.03, seed: int = 0
) -> Callable[[Endpoint, WorkloadSpec], WorkloadResult]:
    """Stands for `run_workload`: a baseline of 100·M^0.7 tok/s, an artifact at `ratio(M)` of it."""
    generator = random.Random(seed)

    def run(endpoint: Endpoint, spec: WorkloadSpec) -> WorkloadResult:
        speed = 100 * spec.m**0.7 * (ratio(spec.m) if endpoint == ARTIFACT else 1.0)
        return load_result(spec.m, speed * math.exp(generator.gauss(0, noise)), ttft=0.01 + 0.001 * spec.m)

    return run


def measured_m(m: int, ratio: float, blocks: int = 6, **options: float) -> MeasuredM:
    """Blocks at one M whose log ratios scatter a little around `ratio`."""
    one = MeasuredM(m)
    for index in range(blocks):
        wobble = 1 + 0.004 * (index % 3 - 1)
        artifact = [load_result(m, 100 * m * ratio * wobble, **options) for _ in range(2)]
        one.blocks.append(Block(artifact, [load_result(m, 100 * m) for _ in range(2)]))
    return one


def sample_verdict(ratios: dict[int, float], checks: tuple[CheckResult, ...] = ()) -> Verdict:
    """A whole verdict with these throughput ratios by M."""
    bounds = Bounds()
    test = SequentialTest(bounds.throughput_floor, len(ratios))
    curve = []
    for m, ratio in ratios.items():
        one = measured_m(m, ratio)
        curve.append(one.curve_point(decide(one.log_ratios(lambda result: result.output_throughput), test)))
    checks = checks or (CheckResult("throughput", "pass", "lowest 1.0", "at least 0.93", "measured"),)
    subject = Subject(
        "base-int4", None, "a" * 64, "b" * 64, "compressed-tensors, INT4 g128, zero points", {"tiles": 28}
    )
    return Verdict(
        status=overall_status(list(checks)),
        artifact=subject,
        baseline=replace(subject, name="base", quantization="none", layouts={}),
        checks=checks,
        curve=tuple(curve),
        environment=describe_environment("cpu", "bfloat16", "embedded", "embedded"),
        workload=WorkloadSettings(tuple(ratios)),
        bounds=bounds,
        quality_tokens=8192,
        quality_text_sha256="c" * 64,
        command="pipeline validate base-int4",
        created="2026-01-01T00:00:00+00:00",
        duration_seconds=61.0,
    )
