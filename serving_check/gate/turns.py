"""Measures servers that take turns, since only one fits at a time; a turn is one side's repeats of a group.

The side that ends one group begins the next, so blocks stay close together in time. A server's first repeats
after a start are warm-up. The blocks of a group share their servers, so their mean counts as one value.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...base.errors import UserError
from ...base.log import logger
from ...base.progress import progress_bar
from ...base.stage_clock import StageClock, in_words
from ..adapters import Endpoint
from ..adapters.taking_turns import TakingTurns
from ..checks.compilations import Compilations, compilations
from ..evidence.curve import binding_decisions_of, rival_decisions_of, sequential_test
from ..evidence.measurement import Block, MeasuredM, Repeat
from ..settings import WorkloadSettings
from ..statistics.decide import GROUP, TURN_LOOKS, Decision, SequentialTest
from ..workload import WorkloadSpec
from .interleaving import SEEDS_PER_M, WARMUP_PART, workload_spec
from .repeats import Repeats

ARTIFACT, BASELINE, RIVAL = "artifact", "baseline", "rival"
LEAST_BLOCKS = TURN_LOOKS[0] * GROUP
"""The fewest blocks that allow a decision by groups."""
LONG_S = 720.0
"""Seconds from which on turns are announced as long, with what makes them shorter."""


def require_groups(workload: WorkloadSettings) -> None:
    """Raise UserError if the workload allows too few blocks to decide anything in turns."""
    if workload.max_blocks < LEAST_BLOCKS:
        raise UserError(
            f"the servers do not fit in memory together and take turns, which needs --max-blocks "
            f"{LEAST_BLOCKS} or more, not {workload.max_blocks}"
        )


def announce(seconds: float, groups: SequentialTest, clock: StageClock) -> None:
    """Print how long the turns will take; print a warning with ways to shorten them, if that is long.

    seconds: how long the first group took
    """
    first, last = seconds * groups.looks[0], seconds * groups.max_blocks
    clock.say(
        f"a group takes {in_words(seconds)}: a first decision after {groups.looks[0]} groups, "
        f"{in_words(first)} in all, and the last after {in_words(last)}"
    )
    if last > LONG_S and clock.shown:
        within = int(LONG_S / seconds) * GROUP
        limit = f"--max-blocks {within} ends within {in_words(LONG_S)}, perhaps undecided; "
        logger.warning(
            f"turns may take {in_words(last)}: a clear ratio is decided in {in_words(first)} to "
            f"{in_words(seconds * groups.looks[1 % len(groups.looks)])}. "
            f"{limit if within >= LEAST_BLOCKS else ''}fewer Ms (--m) or shorter requests (--input-len, "
            "--output-len) shorten each group"
        )


@dataclass
class Turns:
    """The servers that take turns, and the requests for them."""

    servers: TakingTurns
    sides: Sequence[str]
    """`artifact`, `baseline` and perhaps `rival`; the last one begins."""
    workload: WorkloadSettings
    text: Sequence[int]
    repeat: Repeats
    floor: float
    rival_from_m: float = 0.0
    when_first_up: Callable[[str, Endpoint], None] = lambda side, endpoint: None
    """Called once for each side, when its server has started for the first time."""
    is_judged: bool = True
    """Whether speeds are the formats'. If not, they are measured until the first look, and decide nothing."""
    compiled: Compilations | None = None
    """What the artifact's server compiled in its turns, after its warm-up; None if it does not count."""
    _met: set[str] = field(default_factory=set, init=False)

    def measure(self, clock: StageClock) -> list[MeasuredM]:
        """Run group after group over all undecided Ms. A workload that allows too few blocks raises
        UserError.
        """
        require_groups(self.workload)
        measured = [MeasuredM(m) for m in self.workload.measured_ms]
        test = sequential_test(measured, self.workload, self.floor)
        groups = test.of_turns
        order = list(reversed(self.sides))
        began = time.monotonic()
        with progress_bar(total=groups.max_blocks, desc="groups of blocks", shown=clock.shown) as bar:
            undecided = measured
            for group in range(1, groups.max_blocks + 1):
                blocks = {level.m: [Block(restarts=group) for _ in range(GROUP)] for level in undecided}
                # Every side takes its turn even if a request has failed: each must have been up once.
                succeeded = [self._turn(side, undecided, blocks) for side in order]
                for level in undecided:
                    level.blocks += [block for block in blocks[level.m] if block.repeats]
                bar.update()
                if not all(succeeded):
                    break
                if group == 1:
                    announce(time.monotonic() - began, groups, clock)
                order.reverse()
                if group not in groups.looks:
                    continue
                undecided = self._undecided(measured)
                clock.say(f"group {group}: {len(undecided)} of {len(measured)} Ms need further groups")
                if not undecided or self.has_failed(measured):
                    break
        return measured

    def has_failed(self, measured: Sequence[MeasuredM]) -> bool:
        """Say whether a request or an M failed."""
        if any(block.errors for level in measured for block in level.blocks):
            return True
        return self.is_judged and any(decision.status == "fail" for decision in self._decisions(measured))

    def _decisions(self, measured: Sequence[MeasuredM]) -> list[Decision]:
        return binding_decisions_of(measured, self.workload, self.floor)

    def _undecided(self, measured: Sequence[MeasuredM]) -> list[MeasuredM]:
        if not self.is_judged:
            return []
        against = (
            rival_decisions_of(measured, self.workload, self.rival_from_m) if RIVAL in self.sides else {}
        )
        return [
            level
            for level, decision in zip(measured, self._decisions(measured), strict=True)
            if not decision.final or (level.m in against and not against[level.m].final)
        ]

    def _turn(self, side: str, due: Sequence[MeasuredM], blocks: dict[int, list[Block]]) -> bool:
        """Run one side's repeats of a group; return false if a request failed."""
        endpoint, failed = self.take(side, [level.m for level in due])
        if failed is not None:
            _of(side, blocks[failed.m][0]).append(failed.repeat)
            return False
        before = compilations(endpoint.metrics(), endpoint.series)
        for index in range(GROUP):
            for level in due:
                seed = (blocks[level.m][index].restarts - 1) * GROUP + index
                repeat = self._send(side, workload_spec(self.workload, level.m, self.text, seed))
                _of(side, blocks[level.m][index]).append(repeat)
                if repeat.errors:
                    return False
        after = compilations(endpoint.metrics(), endpoint.series)
        if side == ARTIFACT and before is not None and after is not None:
            self.compiled = Counter(self.compiled or {}) + (Counter(after) - Counter(before))
        return True

    def take(self, side: str, ms: Sequence[int]) -> tuple[Endpoint, "FailedWarmUp | None"]:
        """Start that side's server if it is not up, and warm it up at the given Ms; return its endpoint, and
        the first failed repeat of the warm-up, if any.
        """
        fresh = self.servers.up != side
        endpoint = self.servers.take(side)
        if side not in self._met:
            self._met.add(side)
            self.when_first_up(side, endpoint)
        if fresh:
            short = replace(self.workload, output_len=max(1, self.workload.output_len // WARMUP_PART))
            for m, index in itertools.product(ms, range(self.workload.warmups)):
                warm = self._send(side, workload_spec(short, m, self.text, SEEDS_PER_M - 1 - index))
                if warm.errors:
                    return endpoint, FailedWarmUp(m, warm)
        return endpoint, None

    def _send(self, side: str, spec: WorkloadSpec) -> Repeat:
        return self.repeat(self.servers.take(side), spec)


@dataclass(frozen=True)
class FailedWarmUp:
    m: int
    repeat: Repeat


def _of(side: str, block: Block) -> list[Repeat]:
    return {ARTIFACT: block.artifact, BASELINE: block.baseline, RIVAL: block.rival}[side]
