"""The gate: runs the workload on two servers side by side at every M, and keeps what they showed.

It is given servers that are up, and knows nothing of checkpoints; `judge.py` says what follows.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from .checks.canary import Continuation, continuations
from .checks.compilations import Compilations, compilations
from .checks.kv_capacity import kv_cache_tokens, require_capacity
from .checks.loads import packed_layers
from .checks.reached import most_running
from .curve import sequential_test
from .engines import Endpoint
from .evidence import PackedLayers
from .measurement import Block, MeasuredM, Repeat, output_throughput
from .settings import WorkloadSettings
from .statistics import FIRST_LOOK, Decision, block_order, decide
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
    capacity: int | None
    """Tokens that the artifact's KV cache holds, where its server says."""
    limit: int | None = None
    """Requests that the artifact's server runs together at most, where it says."""
    compiled: tuple[Compilations | None, Compilations | None] = (None, None)
    """By the artifact's server since its warm-up: before the first request, and after the last."""
    packed: tuple[PackedLayers, PackedLayers] = (None, None)
    """By the artifact's server, and by the baseline's."""


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
    measured, _ = measure(artifact, baseline, workload, floor, text, run, progress)
    compiled = compilations(said, series), compilations(artifact.metrics(), series)
    packed = packed_layers(said, series), packed_layers(baseline_said, baseline_series)
    return Served(canary, baseline_canary, measured, capacity, most_running(said, series), compiled, packed)


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
    test = sequential_test(workload, floor)
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
        spec = workload_spec(workload, one.m, text, index * SEEDS_PER_BLOCK + len(results))
        results.append(Repeat.of(run(endpoint, spec)))
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
