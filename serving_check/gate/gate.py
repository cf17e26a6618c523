"""The gate: collects from two running servers their own figures, their texts and their speed.

The gate knows nothing of checkpoints. `interleaving.py` measures the speed, `judge.py` draws the conclusions.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...base.stage_clock import StageClock
from ..adapters import Endpoint
from ..adapters.one_server import refuse_one_address, refuse_shared_counter
from ..adapters.taking_turns import TakingTurns
from ..checks.canary import Continuation, continuations
from ..checks.compilations import Compilations, compilations
from ..checks.kv_capacity import kv_cache_tokens, request_memory, require_capacity
from ..checks.loads import packed_layers, packed_on
from ..checks.reached import most_running
from ..checks.stalls import check_stalls, m_in_doubt, m_to_watch
from ..evidence.answer_figures import ServedText, TokenText
from ..evidence.at_rest import AtRestFigures
from ..evidence.company import CompanyFigures
from ..evidence.emulation import EmulatedProducts, emulated_products, is_speed_real, why_not_judged
from ..evidence.evidence import PackedLayers, RepeatedPrompts
from ..evidence.measurement import MeasuredM
from ..evidence.request_memory import RequestMemory
from ..evidence.undisturbed import AloneFigures
from ..settings import Bounds, WorkloadSettings
from ..statistics.decide import LOOKS, Decision
from ..workload import run_workload
from .alone import alone_figures
from .at_rest import Sides, look_after, look_before
from .in_use import LoadInUse, RequestSource, ServedLoad, plan_load
from .interleaving import Rival, Servers, measure, workload_spec
from .profile_load import profile_load
from .repeats import Repeats, Runner, deadline_from, tpot_of
from .turns import ARTIFACT, BASELINE, RIVAL, Turns

CANARY_LENGTH = 32
CANARY_PROMPT = 32
CANARY_REQUESTS = 16

TOGETHER_S = 90.0
"""Seconds, at most, of serving both at once to tell the machine's stalls from the artifact's."""
PATIENCE_S = 25.0
"""Seconds without another stall after which serving both at once ends."""
SHORT_PATIENCE_S = 12.0
"""The same if the artifact has stalled once more than the baseline, most often by chance.

Within this time, a server that stalls every 10 s stalls again. Simulated with Poisson stalls and 22 s served
before, 8 s find 62% of servers that stall once in 10 s and 97% of those that stall once in 5 s; 25 s find 68%
and 98%.
"""
WATCHED_S = 5.0
"""Seconds: a stall every two seconds could be missed in less."""


@dataclass(frozen=True)
class RunFigures:
    """The figures of one run's servers: their part of the evidence."""

    canary: list[Continuation]
    baseline_canary: list[Continuation]
    measured: list[MeasuredM]
    capacity: int | None
    """How many tokens the artifact's KV cache holds; None if its server does not say."""
    limit: int | None = None
    """The most requests that the artifact's server runs together; None if it does not say."""
    request_memory: RequestMemory | None = None
    """What the artifact's server keeps of each request; None if it does not say."""
    compiled: tuple[Compilations | None, Compilations | None] = (None, None)
    """The artifact's server's compilations after warm-up: before the first request, and after the last."""
    packed: tuple[PackedLayers, PackedLayers] = (None, None)
    """The layers packed by the artifact's server, and by the baseline's."""
    packed_on: tuple[str | None, str | None] = (None, None)
    """The device models for which the servers packed their layers; None if a server does not say."""
    kernels: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """The kernels that the logs of the artifact's server and the baseline's name."""
    emulated: tuple[EmulatedProducts, ...] = ()
    """What any of the servers emulates."""
    texts: list[ServedText] = field(default_factory=list)
    """Answers of the artifact's server under load, to be scored."""
    repeated: RepeatedPrompts | None = None
    together: MeasuredM | None = None
    """Blocks served on both servers at once; None if stalls left no doubt."""
    company: CompanyFigures | None = None
    """Answers alone and in a batch; None if the artifact's server does not claim batch invariance."""
    alone: AloneFigures | None = None
    """Each server measured while the other one was stopped; None if it was not measured."""
    in_use: ServedLoad | None = None
    """The figures of the load as in use; None if no such load was sent."""
    at_rest: AtRestFigures | None = None
    """The figures of the servers at rest; None if no load as in use was sent."""


@dataclass(frozen=True)
class GateRun:
    """The arguments of a gate run besides its servers."""

    workload: WorkloadSettings
    bounds: Bounds
    text: Sequence[int]
    """Token ids that prompts are cut from."""
    tokenizer: TokenText
    clock: StageClock
    runner: Runner = run_workload
    """Sends one repeat."""
    watched_s: float = WATCHED_S
    """The least time, in seconds, that the artifact serves, so that its stalls show."""
    source: RequestSource | None = None
    """Where the requests of a load as in use come from; None sends no such load."""
    gpus: tuple[int, ...] = ()
    """The GPUs that the servers run on; empty on a CPU."""


def serve_and_measure(
    artifact: Endpoint,
    baseline: Endpoint,
    run: GateRun,
    restart: Callable[[], None] | None = None,
    rival: Rival | None = None,
) -> RunFigures:
    """Collect canary texts, then run the interleaved repeats until every M is decided or out of blocks.

    One server behind two endpoints, or a KV cache too small for the workload, raises UserError.
    restart: starts all servers anew, at the same addresses; None if that is not ours to do
    """
    _refuse_shared_addresses(artifact, baseline, rival)
    _require_rival_capacity(rival, run.workload)
    said, baseline_said = artifact.metrics(), baseline.metrics()
    emulated = _emulated({ARTIFACT: artifact, BASELINE: baseline}, rival, run.clock)
    capacity = _require_capacity("the artifact's server", artifact, said, run.workload)
    _require_capacity("the baseline's server", baseline, baseline_said, run.workload)
    with run.clock.stage("canary text"):
        canary, baseline_canary = _canary_texts(artifact, baseline, said, run)
    repeats = Repeats(run.runner, artifact, baseline, run.tokenizer)
    servers = Servers(artifact, baseline, run.workload, run.text, repeats, rival)
    is_judged = is_speed_real(emulated)
    measured, decisions = measure(servers, run.bounds, run.clock, restart, is_judged)
    failed = _has_failed(measured, decisions)
    in_use = at_rest = alone = None
    if not failed and run.source is not None:
        alone = _alone(servers, run) if is_judged else None
        with run.clock.stage("load as in use"):
            before = look_before(artifact)
            load = plan_load(
                [artifact, baseline], measured, run.workload, run.text, run.tokenizer, run.source, canary
            )
            in_use = load.serve(artifact, baseline)
        in_use = _with_profile(artifact, baseline, measured, run, run.source, load, in_use)
        with run.clock.stage("at rest"):
            sides = Sides(artifact, baseline, run.workload, run.text, repeats, load.kinds, run.source.context)
            at_rest = look_after(sides, measured, before, in_use.requests)
    with run.clock.stage("another look"):
        together = serve_together(servers, measured, run, in_use) if is_judged and not failed else None
        repeated = repeat_prompts(servers, measured)
    return RunFigures(
        canary=canary,
        baseline_canary=baseline_canary,
        measured=measured,
        capacity=capacity,
        **_room_for_requests(said, artifact),
        compiled=(compilations(said, artifact.series), compilations(artifact.metrics(), artifact.series)),
        packed=(packed_layers(said, artifact.series), packed_layers(baseline_said, baseline.series)),
        packed_on=(packed_on(said, artifact.series), packed_on(baseline_said, baseline.series)),
        kernels=(artifact.kernels(), baseline.kernels()),
        emulated=emulated,
        texts=repeats.texts_to_score(),
        repeated=repeated,
        together=together,
        alone=alone,
        in_use=in_use,
        at_rest=at_rest,
    )


def _emulated(
    sides: Mapping[str, Endpoint], rival: Rival | None, clock: StageClock
) -> tuple[EmulatedProducts, ...]:
    """Return the products that the servers emulate, and print them: in that case speed is not judged."""
    endpoints = {**sides, **({} if rival is None else {RIVAL: rival.endpoint})}
    emulated = tuple(
        products
        for side, endpoint in endpoints.items()
        for products in emulated_products(side, endpoint.metrics(), endpoint.series)
    )
    if emulated:
        clock.say(f"speed will not be judged: {why_not_judged(emulated)}")
    return emulated


def _has_failed(measured: Sequence[MeasuredM], decisions: Sequence[Decision]) -> bool:
    """Say whether a request or an M failed."""
    broken_off = any(block.errors for level in measured for block in level.blocks)
    return broken_off or any(decision.status == "fail" for decision in decisions)


def _alone(servers: Servers, run: GateRun) -> AloneFigures | None:
    with run.clock.stage("each server alone"):
        return alone_figures(servers, run.gpus)


def _with_profile(
    artifact: Endpoint,
    baseline: Endpoint,
    measured: Sequence[MeasuredM],
    run: GateRun,
    source: RequestSource,
    load: LoadInUse,
    in_use: ServedLoad,
) -> ServedLoad:
    """Return `in_use` with the figures of the requested profile, if one was requested."""
    if run.workload.profile is None:
        return in_use
    with run.clock.stage("profile of loads"):
        profile = _profile(baseline, measured, run, source, load, in_use)
        if profile is None:
            return in_use
        return profile.with_profile(in_use, profile.serve(artifact, baseline))


def _profile(
    baseline: Endpoint,
    measured: Sequence[MeasuredM],
    run: GateRun,
    source: RequestSource,
    load: LoadInUse,
    in_use: ServedLoad,
) -> LoadInUse | None:
    """Return the load of the requested profile; None if no profile was requested, or if a request has
    failed.
    """
    blocks = in_use.figures.blocks
    if any(side.errors for block in blocks for side in (block.artifact, block.baseline) if side):
        return None
    profile = profile_load(measured, run.workload, run.text, source.context, load, blocks)
    return None if profile is None else profile.planned(baseline, run.tokenizer, run.clock.elapsed)


def _refuse_shared_addresses(artifact: Endpoint, baseline: Endpoint, rival: Rival | None) -> None:
    refuse_one_address(artifact, baseline)
    if rival is not None:
        refuse_one_address(artifact, rival.endpoint)
        refuse_one_address(baseline, rival.endpoint)


def _require_rival_capacity(rival: Rival | None, workload: WorkloadSettings) -> None:
    if rival is not None:
        _require_capacity("the rival's server", rival.endpoint, rival.endpoint.metrics(), workload)


def _require_capacity(
    name: str, endpoint: Endpoint, said: dict[str, float], workload: WorkloadSettings
) -> int | None:
    """Return the tokens that the KV cache holds; None if the server does not say. A number that is too small
    raises UserError.
    """
    held = kv_cache_tokens(said, endpoint.series)
    require_capacity(name, held, workload)
    return held


def _room_for_requests(said: dict[str, float], artifact: Endpoint) -> dict[str, Any]:
    """Return the fields of `RunFigures` on how many requests run together, and what the server keeps of
    each.
    """
    series = artifact.series
    return {"limit": most_running(said, series), "request_memory": request_memory(said, series)}


def _canary_texts(
    artifact: Endpoint, baseline: Endpoint, said: dict[str, float], run: GateRun
) -> tuple[list[Continuation], list[Continuation]]:
    """Return the texts of the artifact's server and of the baseline's, which goes first: its time sets the
    deadline.

    said: the artifact's metrics before the texts were generated UserError is raised if the artifact's server
    counts the baseline's tokens.
    """
    prompts = canary_prompts(run.text)
    started = time.perf_counter()
    baseline_canary = continuations(baseline, prompts, CANARY_LENGTH, run.tokenizer.encode)
    deadline = deadline_from(time.perf_counter() - started)
    tokens = sum(len(continuation.tokens) for continuation in baseline_canary)
    refuse_shared_counter(artifact, said, artifact.metrics(), tokens)
    return continuations(artifact, prompts, CANARY_LENGTH, run.tokenizer.encode, deadline), baseline_canary


def serve_together(
    servers: Servers, measured: Sequence[MeasuredM], run: GateRun, in_use: ServedLoad | None = None
) -> MeasuredM | None:
    """Load both servers at once if the artifact's stalls may be the machine's, or if the artifact served too
    briefly to show stalls; None if neither holds.

    The load ends after a while in which the artifact alone did not stall, or once there are enough stalls to
    fail.
    """
    blocks = () if in_use is None else in_use.figures.blocks
    in_doubt = m_in_doubt(measured, run.bounds, blocks)
    watched = math.fsum(
        (
            *(repeat.duration for level in measured for repeat in level.artifact),
            *(block.artifact.duration for block in blocks if block.artifact is not None),
        )
    )
    m = in_doubt or (m_to_watch(measured) if watched < run.watched_s else None)
    if m is None or any(block.errors for level in measured for block in level.blocks):
        return None
    together = MeasuredM(m)
    began = last = time.monotonic()
    patience = run.watched_s - watched
    if in_doubt:
        before = check_stalls(measured, run.bounds, in_use=blocks).figures
        more = int(before["stalled_repeats"] or 0) - int(before["baseline_stalled_repeats"] or 0)
        patience = PATIENCE_S if more > 1 else SHORT_PATIENCE_S
    stalls = 0
    while (now := time.monotonic()) < min(last + patience, began + TOGETHER_S):
        servers.run_together(together)
        if together.blocks[-1].errors:
            # `no failed requests` judges a failed request, whichever repeat it was in.
            next(level for level in measured if level.m == m).blocks.append(together.blocks.pop())
            break
        result = check_stalls(measured, run.bounds, together, blocks)
        if result.status == "fail":
            break
        if (found := int(result.figures["stalled_alone"] or 0)) > stalls:
            stalls, last, patience = found, now, PATIENCE_S if in_doubt else max(patience, run.watched_s)
    return together


def serve_in_turns(servers: TakingTurns, sides: Sequence[str], run: GateRun) -> RunFigures:
    """Measure like `serve_and_measure`, with one server up at a time.

    sides: `artifact`, `baseline` and perhaps `rival`
    """
    prompts = canary_prompts(run.text)
    said: dict[str, dict[str, float]] = {}
    canaries: dict[str, list[Continuation]] = {}
    repeats = Repeats(run.runner, None, None, run.tokenizer)

    emulated: list[EmulatedProducts] = []

    def when_first_up(side: str, endpoint: Endpoint) -> None:
        said[side] = endpoint.metrics()
        emulated.extend(emulated_products(side, said[side], endpoint.series))
        turns.is_judged = is_speed_real(emulated)
        _require_capacity(f"the {side}'s server", endpoint, said[side], run.workload)
        canaries[side] = continuations(endpoint, prompts, CANARY_LENGTH, run.tokenizer.encode)
        if side == ARTIFACT:
            repeats.artifact = endpoint
        elif side == BASELINE:
            repeats.baseline = endpoint

    turns = Turns(
        servers,
        sides,
        run.workload,
        run.text,
        repeats,
        run.bounds.throughput_floor,
        run.bounds.max_first_rival_m,
        when_first_up,
    )
    with run.clock.stage("groups of blocks in turns"):
        measured = turns.measure(run.clock)
    artifact, baseline = servers.endpoint(ARTIFACT), servers.endpoint(BASELINE)
    in_use = at_rest = None
    if run.source is not None and not turns.has_failed(measured):
        in_use, at_rest = _in_use_in_turns(turns, measured, run, run.source, canaries[ARTIFACT])
    return RunFigures(
        canary=canaries[ARTIFACT],
        baseline_canary=canaries[BASELINE],
        measured=measured,
        capacity=kv_cache_tokens(said[ARTIFACT], artifact.series),
        **_room_for_requests(said[ARTIFACT], artifact),
        compiled=(None if turns.compiled is None else {}, turns.compiled),
        packed=(
            packed_layers(said[ARTIFACT], artifact.series),
            packed_layers(said[BASELINE], baseline.series),
        ),
        packed_on=(packed_on(said[ARTIFACT], artifact.series), packed_on(said[BASELINE], baseline.series)),
        kernels=(artifact.kernels(), baseline.kernels()),
        emulated=tuple(sorted(emulated, key=lambda products: sides.index(products.side))),
        texts=repeats.texts_to_score(),
        in_use=in_use,
        at_rest=at_rest,
    )


def _in_use_in_turns(
    turns: Turns,
    measured: Sequence[MeasuredM],
    run: GateRun,
    source: RequestSource,
    canary: Sequence[Continuation],
) -> tuple[ServedLoad, AtRestFigures]:
    """Send all blocks of a load as in use to the baseline's server, then all to the artifact's, both after a
    warm-up.
    """
    ms = [level.m for level in measured]
    with run.clock.stage("load as in use"):
        baseline, _ = turns.take(BASELINE, ms)
        load = plan_load([baseline], measured, run.workload, run.text, run.tokenizer, source, canary)
        theirs = load.serve_one(baseline)
        profile = _profile(baseline, measured, run, source, load, load.served([], theirs))
        theirs_of_profile = profile.serve_one(baseline) if profile is not None else []
        artifact, _ = turns.take(ARTIFACT, ms)
        before = look_before(artifact)
        in_use = load.served(load.serve_one(artifact), theirs)
        if profile is not None:
            served = profile.served(profile.serve_one(artifact), theirs_of_profile)
            in_use = profile.with_profile(in_use, served)
    with run.clock.stage("at rest"):
        sides = Sides(artifact, None, run.workload, run.text, turns.repeat, load.kinds, source.context)
        return in_use, look_after(sides, measured, before, in_use.requests)


def repeat_prompts(servers: Servers, measured: Sequence[MeasuredM]) -> RepeatedPrompts | None:
    """Send the prompts of the artifact's last repeat again: a cached answer comes at once.

    The result is None with fewer repeats than the first look has: even the fastest may have been disturbed.
    """
    level = next((level for level in reversed(measured) if len(level.artifact) >= LOOKS[0]), None)
    first = None if level is None else tpot_of(level.artifact)
    if level is None or first is None or any(block.errors for block in level.blocks):
        return None
    spec = workload_spec(servers.workload, level.m, servers.text, seed=0)
    second = tpot_of([servers.repeat(servers.artifact, replace(spec, seed=level.artifact[-1].seed))])
    return None if second is None else RepeatedPrompts(level.m, first, second)


def canary_prompts(text: Sequence[int]) -> list[tuple[int, ...]]:
    """Yield slices of the held-out text, spread over all of it."""
    stride = max(1, (len(text) - CANARY_PROMPT) // CANARY_REQUESTS)
    starts = range(0, max(1, len(text) - CANARY_PROMPT), stride)
    return [tuple(text[start : start + CANARY_PROMPT]) for start in list(starts)[:CANARY_REQUESTS]]
