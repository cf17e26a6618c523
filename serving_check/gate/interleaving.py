"""Measures two servers, or three with a rival, side by side in blocks of repeats until every M is decided.

The module chooses the blocks and their order; `statistics/decide.py` decides, `repeats.py` runs a repeat.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ...base.progress import progress_bar
from ...base.stage_clock import StageClock, in_words
from ..adapters import Endpoint
from ..checks.stalls import surely_stalls
from ..evidence.curve import (
    binding_decisions_of,
    ms_open_for_prompts,
    rival_decisions_of,
    sequential_test,
)
from ..evidence.measurement import Block, MeasuredM, Repeat
from ..settings import Bounds, WorkloadSettings
from ..statistics.decide import (
    GROUP,
    LOOKS,
    Decision,
    SequentialTest,
    block_order,
    is_far_below,
    is_hopeless,
    needs_new_servers,
)
from ..workload import WorkloadSpec

WARMUP_PART = 4
"""A warm-up has this many times fewer output tokens than a measured repeat."""
SEEDS_PER_M = 1000
SEEDS_PER_RUN = 1_000_000


def measure(
    servers: "Servers",
    bounds: Bounds,
    clock: StageClock,
    restart: Callable[[], None] | None = None,
    is_judged: bool = True,
) -> tuple[list[MeasuredM], list[Decision]]:
    """Run block after block over all undecided Ms, so that a slow minute of the machine affects every M
    alike.

    If blocks are too correlated to decide, the servers are restarted for each group of blocks. Measuring ends
    early once every M is decided, once one M has failed or the artifact certainly stalls and every M has had
    its first look, and at the first failed request, which decides by itself.

    is_judged: whether these speeds are the formats'; if not, every M gets its first look, and no decision
    """
    workload = servers.workload
    floor = bounds.throughput_floor
    measured = [MeasuredM(m) for m in workload.measured_ms]
    test = sequential_test(measured, workload, floor)
    with clock.stage("warm-up"):
        for level in measured:
            if not servers.warm_up(level):
                return measured, binding_decisions_of(measured, servers.workload, test.floor)
            # So slow that it needs no statistics? One more look, and it is over.
            if (
                is_judged
                and level.m in workload.ms
                and is_far_below(level.first_looks, floor)
                and (not servers.run_block(level) or is_hopeless(level.first_looks, floor))
            ):
                return measured, binding_decisions_of(measured, servers.workload, test.floor)
    if not is_judged:
        with clock.stage("blocks of repeats"):
            _look_once(servers, measured, test, clock)
        return measured, []
    clock.say(_estimate(measured, test))
    with clock.stage("blocks of repeats"):
        decisions = _decide(servers, measured, test, bounds, clock, can_restart=restart is not None)
    if restart is not None and not surely_stalls(measured, bounds) and needs_new_servers(decisions, test):
        clock.say("consecutive blocks are correlated: restarting the servers for each group of blocks")
        with clock.stage("blocks on new servers"):
            decisions = _decide_in_groups(servers, measured, test, clock, restart)
    return measured, decisions


def _look_once(
    servers: "Servers", measured: Sequence[MeasuredM], test: SequentialTest, clock: StageClock
) -> None:
    """Run the blocks of the first look at every M; they end at the first failed request."""
    blocks = min(LOOKS[0], test.max_blocks)
    with progress_bar(total=blocks, desc="blocks", unit="block", shown=clock.shown) as bar:
        for _ in range(blocks):
            for level in measured:
                if not servers.run_block(level):
                    return
            bar.update()


def _decide(
    servers: "Servers",
    measured: list[MeasuredM],
    test: SequentialTest,
    bounds: Bounds,
    clock: StageClock,
    can_restart: bool,
) -> list[Decision]:
    decisions = binding_decisions_of(measured, servers.workload, test.floor)
    bar = progress_bar(total=len(measured), desc="deciding", unit="M", shown=clock.shown)
    with bar:
        settled = servers.settled_against_rival(measured)
        of_prompts: frozenset[int] = frozenset()
        for blocks in range(1, test.max_blocks + 1):
            for level, decision in zip(measured, decisions, strict=True):
                known = decision.final and level.m in settled
                if known or level.rounds >= blocks or _given_up(decisions, blocks):
                    continue
                bar.set_postfix_str(f"M={level.m} block {blocks}")
                run = servers.run_prompt_block if level.m in of_prompts else servers.run_block
                if not run(level):
                    return binding_decisions_of(measured, servers.workload, test.floor)
            if blocks not in test.looks:
                continue
            before, decisions = decisions, binding_decisions_of(measured, servers.workload, test.floor)
            for level, old, new in zip(measured, before, decisions, strict=True):
                if new.final and not old.final:
                    bar.update()
                    clock.say(_sentence(level.m, new))
            settled = servers.settled_against_rival(measured)
            of_prompts = ms_open_for_prompts(measured, servers.workload, test.floor) & settled
            if all(
                decision.final and level.m in settled
                for level, decision in zip(measured, decisions, strict=True)
            ):
                break
            if surely_stalls(measured, bounds) or (can_restart and needs_new_servers(decisions, test)):
                break
    return decisions


def _decide_in_groups(
    servers: "Servers",
    measured: list[MeasuredM],
    test: SequentialTest,
    clock: StageClock,
    restart: Callable[[], None],
) -> list[Decision]:
    decisions = binding_decisions_of(measured, servers.workload, test.floor)
    for group in range(1, test.of_groups.max_blocks + 1):
        undecided = [level for level, decision in zip(measured, decisions, strict=True) if not decision.final]
        if max(level.rounds for level in undecided) + GROUP > test.max_blocks:
            break
        restart()
        for level in undecided:
            servers.warm_up(MeasuredM(level.m))
        for _ in range(GROUP):
            if not all(servers.run_block(level, group) for level in undecided):
                return binding_decisions_of(measured, servers.workload, test.floor)
        if group in test.of_groups.looks:
            decisions = binding_decisions_of(measured, servers.workload, test.floor)
        if all(decision.final for decision in decisions) or _given_up(decisions, test.max_blocks):
            break
    for level in undecided:
        clock.say(_sentence(level.m, decisions[measured.index(level)]))
    return decisions


def _estimate(measured: Sequence[MeasuredM], test: SequentialTest) -> str:
    """Return an estimate of the blocks' time, from the speeds of the warm-up."""
    warmed = [repeat for level in measured for block in level.warmups[-1:] for repeat in block.repeats]
    first = [max(repeat.ttfts, default=0.0) for repeat in warmed]
    in_a_round = sum(
        ttft + (repeat.duration - ttft) * WARMUP_PART for repeat, ttft in zip(warmed, first, strict=True)
    )
    times = [in_words(in_a_round * blocks) for blocks in (LOOKS[0], test.max_blocks)]
    return (
        f"{LOOKS[0]} to {test.max_blocks} blocks of repeats at each M: some {times[0]} on a quiet machine, "
        f"{times[1]} at most"
    )


def _sentence(m: int, decision: Decision) -> str:
    interval = f"[{decision.low:.3f}, {decision.high:.3f}]"
    return f"M={m}: {decision.status}, ratio {decision.ratio:.3f} {interval} after {decision.blocks} blocks"


def _given_up(decisions: Sequence[Decision], blocks: int) -> bool:
    """Say whether one M has failed, so that the others need no more than their first look."""
    return blocks > LOOKS[0] and any(decision.status == "fail" for decision in decisions)


@dataclass(frozen=True)
class Rival:
    """A third server, whose model the artifact must be faster than."""

    endpoint: Endpoint
    from_m: float
    """The artifact must be faster at every M from this one on; at smaller Ms the ratio is only shown."""


@dataclass(frozen=True)
class Servers:
    """The servers to measure, and the requests for them."""

    artifact: Endpoint
    baseline: Endpoint
    workload: WorkloadSettings
    text: Sequence[int]
    repeat: Callable[[Endpoint, WorkloadSpec], Repeat]
    rival: Rival | None = None

    def settled_against_rival(self, measured: Sequence[MeasuredM]) -> set[int]:
        """Return the Ms at which the comparison with the rival needs no further block."""
        ms = {level.m for level in measured}
        if self.rival is None:
            return ms
        decisions = rival_decisions_of(measured, self.workload, self.rival.from_m)
        return ms - {m for m, decision in decisions.items() if not decision.final}

    def warm_up(self, level: MeasuredM) -> bool:
        """Run short repeats of every side, kept as first looks; return false if a request failed.

        The baseline goes first: its speed sets the artifact's deadline.
        """
        short = replace(self.workload, output_len=max(1, self.workload.output_len // WARMUP_PART))
        for index in range(self.workload.warmups):
            spec = workload_spec(short, level.m, self.text, seed=SEEDS_PER_M - 1 - index)
            block = self._block(index + 1, spec)
            # A failed request ends the measuring, whichever repeat it was in.
            (level.blocks if block.errors else level.warmups).append(block)
            if block.errors:
                return False
        return True

    def run_block(self, level: MeasuredM, restarts: int = 0) -> bool:
        """Add a block to `level`; return false if a request failed, which leaves the block unfinished."""
        index = level.rounds
        block = self._block(index, workload_spec(self.workload, level.m, self.text, index))
        level.blocks.append(replace(block, restarts=restarts))
        return not block.errors

    def run_prompt_block(self, level: MeasuredM) -> bool:
        """Add a block with short answers to `level`; return false if a request failed."""
        spec = workload_spec(self.workload.with_short_answers, level.m, self.text, level.rounds)
        block = self._block(level.rounds, spec)
        # A failed request ends the measuring, whichever repeat it was in.
        (level.blocks if block.errors else level.prompt_blocks).append(block)
        return not block.errors

    def run_together(self, level: MeasuredM) -> None:
        """Add a block to `level` whose repeats run on both servers at the same time."""
        seed = SEEDS_PER_M // 2 + len(level.blocks)
        spec = workload_spec(self.workload, level.m, self.text, seed)
        with ThreadPoolExecutor() as pool:
            ours = pool.submit(self.repeat, self.artifact, spec)
            theirs = pool.submit(self.repeat, self.baseline, spec)
        level.blocks.append(Block([ours.result()], [theirs.result()]))

    def _block(self, index: int, spec: WorkloadSpec) -> Block:
        block = Block()
        sides = {"A": (self.artifact, block.artifact), "B": (self.baseline, block.baseline)}
        if self.rival is not None:
            sides["R"] = (self.rival.endpoint, block.rival)
        for side in block_order(index, with_rival=self.rival is not None):
            endpoint, repeats = sides[side]
            repeats.append(self.repeat(endpoint, spec))
            if repeats[-1].errors:
                break
        return block


def workload_spec(workload: WorkloadSettings, m: int, text: Sequence[int], seed: int) -> WorkloadSpec:
    """Return the requests of one repeat at M; artifact and baseline repeats of the same `seed` send the same
    prompts.
    """
    request = workload.at(m)
    return WorkloadSpec(
        m=m,
        num_requests=m * workload.waves,
        input_len=request.input_len,
        output_len=request.output_len,
        seed=workload.seed * SEEDS_PER_RUN + m * SEEDS_PER_M + seed,
        token_pool=tuple(text),
    )
