"""The gate: runs the workload on two servers side by side at every M, then lets every check judge.

It is given servers that are up and figures that were taken in process; it knows nothing of checkpoints.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from .checks.canary import Continuation, Scorer, check_canary, continuations
from .checks.compilations import Compilations, check_compilations, compilations
from .checks.diagnosis import Diagnosis
from .checks.failures import check_failures
from .checks.kv_capacity import check_kv_capacity, kv_cache_tokens, require_capacity
from .checks.latency import check_latency
from .checks.loads import Loaded, PackedLayers, check_loads, packed_layers
from .checks.quality import check_quality
from .checks.reached import check_reached, most_running
from .checks.throughput import check_throughput
from .engines import Endpoint
from .measurement import Block, MeasuredM, output_throughput
from .quality import Comparison
from .settings import Bounds, WorkloadSettings
from .statistics import FIRST_LOOK, Decision, SequentialTest, block_order, decide
from .verdict import CheckResult, CurvePoint
from .workload import WorkloadResult, WorkloadSpec, run_workload

CANARY_LENGTH = 32
CANARY_PROMPT = 32
CANARY_REQUESTS = 16

Runner = Callable[[Endpoint, WorkloadSpec], WorkloadResult]
SEEDS_PER_BLOCK = 2
SEEDS_PER_M = 1000
SEEDS_PER_RUN = 1_000_000


@dataclass(frozen=True)
class Served:
    """What two servers showed."""

    canary: list[Continuation]
    baseline_canary: list[Continuation]
    measured: list[MeasuredM]
    decisions: list[Decision]
    """One for each of `measured`, in the same order."""
    capacity: int | None
    """Tokens that the artifact's KV cache holds, where its server says."""
    limit: int | None = None
    """Requests that the artifact's server runs together at most, where it says."""
    compiled: tuple[Compilations | None, Compilations | None] = (None, None)
    """By the artifact's server since its warm-up: before the first request, and after the last."""
    packed: tuple[PackedLayers, PackedLayers] = (None, None)
    """By the artifact's server, and by the baseline's."""

    @property
    def curve(self) -> list[CurvePoint]:
        pairs = zip(self.measured, self.decisions, strict=True)
        return [one.curve_point(decision) for one, decision in pairs if one.artifact and one.baseline]


def serve_and_measure(
    artifact: Endpoint,
    baseline: Endpoint,
    workload: WorkloadSettings,
    floor: float,
    text: Sequence[int],
    tokenize: Callable[[str], Sequence[int]],
    run: Runner = run_workload,
    progress: bool = True,
) -> Served:
    """Canary texts, then the interleaved repeats until every M is decided or out of blocks.

    text: token ids that prompts are cut from
    """
    said, baseline_said = artifact.metrics(), baseline.metrics()
    series, baseline_series = artifact.series, baseline.series
    capacity = kv_cache_tokens(said, series)
    require_capacity("the artifact's server", capacity, workload)
    require_capacity("the baseline's server", kv_cache_tokens(baseline_said, baseline_series), workload)
    prompts = canary_prompts(text)
    canary = continuations(artifact, prompts, CANARY_LENGTH, tokenize)
    baseline_canary = continuations(baseline, prompts, CANARY_LENGTH, tokenize)
    measured, decisions = measure(artifact, baseline, workload, floor, text, run, progress)
    compiled = compilations(said, series), compilations(artifact.metrics(), series)
    packed = packed_layers(said, series), packed_layers(baseline_said, baseline_series)
    return Served(
        canary, baseline_canary, measured, decisions, capacity, most_running(said, series), compiled, packed
    )


def measure(
    artifact: Endpoint,
    baseline: Endpoint,
    workload: WorkloadSettings,
    floor: float,
    text: Sequence[int],
    run: Runner = run_workload,
    progress: bool = True,
) -> tuple[list[MeasuredM], list[Decision]]:
    """Block after block over all undecided Ms, so that a slow minute of the machine meets every M alike.

    Ends early where every M is decided, where one M has failed and all have their first look, and at the
    first failed request, which decides by itself.
    """
    test = SequentialTest(floor=floor, number_of_ms=len(workload.ms), max_blocks=workload.max_blocks)
    measured = [MeasuredM(m) for m in sorted(workload.ms)]
    decisions = [decide([], test) for _ in measured]
    bar = tqdm(total=len(measured), desc="deciding", unit="M", disable=None if progress else True)
    with bar:
        for index in range(workload.max_blocks):
            for position, one in enumerate(measured):
                if decisions[position].final or _given_up(decisions, index):
                    continue
                bar.set_postfix_str(f"M={one.m} block {index + 1}")
                failed = _run_block(artifact, baseline, workload, text, run, one, index)
                decisions[position] = decide(one.log_ratios(output_throughput), test)
                if decisions[position].final:
                    bar.update()
                    if progress:
                        bar.write(_sentence(one.m, decisions[position]), file=sys.stderr)
                if failed:
                    return measured, decisions
    return measured, decisions


def _sentence(m: int, decision: Decision) -> str:
    interval = f"[{decision.low:.3f}, {decision.high:.3f}]"
    return f"M={m}: {decision.status}, ratio {decision.ratio:.3f} {interval} after {decision.blocks} blocks"


def _given_up(decisions: Sequence[Decision], index: int) -> bool:
    """One M has failed, so the verdict stands; the others need no more than their first look."""
    return index >= FIRST_LOOK and any(decision.status == "fail" for decision in decisions)


def _run_block(
    artifact: Endpoint,
    baseline: Endpoint,
    workload: WorkloadSettings,
    text: Sequence[int],
    run: Runner,
    one: MeasuredM,
    index: int,
) -> bool:
    """Add one block to `one`; true where a request failed, and the block is then left unfinished."""
    if index == 0:
        for warmup in range(workload.warmups):
            for endpoint in (artifact, baseline):
                run(endpoint, workload_spec(workload, one.m, text, seed=SEEDS_PER_M - 1 - warmup))
    block = Block()
    one.blocks.append(block)
    for side in block_order(index):
        endpoint, results = (artifact, block.artifact) if side == "A" else (baseline, block.baseline)
        results.append(
            run(endpoint, workload_spec(workload, one.m, text, index * SEEDS_PER_BLOCK + len(results)))
        )
        if results[-1].errors:
            return True
    return False


def workload_spec(workload: WorkloadSettings, m: int, text: Sequence[int], seed: int) -> WorkloadSpec:
    """One repeat at M; artifact and baseline repeats of the same `seed` send the same prompts."""
    return WorkloadSpec(
        m=m,
        num_requests=m * workload.waves,
        input_len=workload.input_len,
        output_len=workload.output_len,
        seed=workload.seed * SEEDS_PER_RUN + m * SEEDS_PER_M + seed,
        token_pool=tuple(text),
    )


def canary_prompts(text: Sequence[int]) -> list[tuple[int, ...]]:
    """Slices of the held-out text, spread over all of it."""
    stride = max(1, (len(text) - CANARY_PROMPT) // CANARY_REQUESTS)
    starts = range(0, max(1, len(text) - CANARY_PROMPT), stride)
    return [tuple(text[start : start + CANARY_PROMPT]) for start in list(starts)[:CANARY_REQUESTS]]


def judge(
    loaded: Loaded,
    baseline_loaded: Loaded,
    comparison: Comparison,
    served: Served,
    score: Scorer,
    diagnose: Callable[[int], Diagnosis],
    workload: WorkloadSettings,
    bounds: Bounds,
) -> list[CheckResult]:
    """Every check in order. `diagnose` is asked about an M only where it failed."""
    curve = served.curve
    diagnoses = {point.m: diagnose(point.m) for point in curve if point.status == "fail"}
    return [
        check_loads(loaded, baseline_loaded, *served.packed),
        check_canary(served.canary, served.baseline_canary, score, bounds),
        check_quality(comparison, bounds),
        check_failures(served.measured),
        check_reached(curve, bounds.min_reached, served.limit),
        check_throughput(curve, bounds.throughput_floor, diagnoses, workload.max_blocks),
        check_latency(served.measured, bounds),
        check_kv_capacity(curve, workload, served.capacity),
        check_compilations(*served.compiled),
    ]
