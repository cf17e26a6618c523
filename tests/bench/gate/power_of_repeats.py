"""Faults that repeats of the curve show, put into those that a sound run recorded: stalls and slow requests.

The gate's own measuring (`gate/interleaving.py`, and `serve_together` where stalls leave a doubt) runs on a
clock of its own. Each block is drawn from those that the verdict recorded, so that the machine's noise is
real, and the artifact's repeat is given the fault. `power.py` counts what is caught.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

from scalegate.base.stage_clock import StageClock
from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.checks import latency, stalls
from scalegate.serving_check.evidence.gaps import Gap, LongestGaps
from scalegate.serving_check.evidence.measurement import Block, MeasuredM, Repeat
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.gate import gate, interleaving
from scalegate.serving_check.workload import WorkloadSpec
from scalegate.tests.bench.gate.simulated_fault import SimulatedFault

QUIET = StageClock(shown=False)
ARTIFACT, BASELINE = Endpoint("http://artifact", "artifact"), Endpoint("http://baseline", "baseline")
BETWEEN_S = 0.02
"""Seconds from the end of a repeat to the beginning of the next, in which nothing is asked for."""
PAUSES = [
    *((2.0, seconds) for seconds in (0.05, 0.1, 0.2, 0.4)),
    *((10.0, seconds) for seconds in (0.1, 0.2, 0.4, 1.0)),
    *((30.0, seconds) for seconds in (0.4, 1.0, 3.0)),
    *((120.0, seconds) for seconds in (1.0, 10.0)),
]
"""Every so many seconds, for so many."""
SLOW = [(share, factor) for share in (0.25, 0.1, 0.05, 0.02) for factor in (1.5, 2.0, 4.0)]
"""Of all requests, so many times as long a token."""

Change = Callable[[Repeat, float], Repeat]
"""What a fault makes of a repeat of the artifact that begins at that time."""


def pauses(every: float, seconds: float) -> SimulatedFault:
    def changing(generator: random.Random) -> Change:
        phase = generator.uniform(0, every)
        return lambda repeat, began: paused(repeat, began, every, seconds, phase)

    name = f"pauses of {seconds:g} s every {every:g} s"
    return SimulatedFault(name, stalls.NAME, functools.partial(statuses, changing=changing))


def paused(repeat: Repeat, began: float, every: float, seconds: float, phase: float) -> Repeat:
    """The server stands still in each pause, and goes on where it was."""
    filled = max(repeat.ttfts, default=0.0)
    filling, decoding, served, now = 0.0, 0.0, 0.0, began
    longest = {True: repeat.gaps.filling, False: repeat.gaps.decoding}
    for turn in itertools.count(math.floor((began - phase) / every)):
        start, end = phase + turn * every, phase + turn * every + seconds
        if end <= now:
            continue
        ran = max(0.0, min(start - now, repeat.duration - served))
        served, now = served + ran, now + ran
        if served >= repeat.duration:
            break
        lost, is_filling = end - now, served < filled
        filling, decoding = filling + lost * is_filling, decoding + lost * (not is_filling)
        gap = Gap(now - began, lost)
        longest[is_filling] = max(longest[is_filling], gap, key=lambda candidate: candidate.seconds)
        now = end
    if not filling + decoding:
        return repeat
    tokens = max(1, repeat.output_tokens // max(1, repeat.requests) - 1)
    longest_gap = max(gap.seconds for gap in longest.values())
    return replace(
        repeat,
        duration=repeat.duration + filling + decoding,
        ttfts=tuple(ttft + filling for ttft in repeat.ttfts),
        tpots=tuple(tpot + decoding / tokens for tpot in repeat.tpots),
        # A pause falls on one of some sixty gaps of every stream, far more than one in a thousand.
        itl_p999=max(repeat.itl_p999 or 0.0, longest[False].seconds),
        itl_max=max(repeat.itl_max or 0.0, longest_gap),
        gaps=LongestGaps(longest[True], longest[False]),
    )


def slow_requests(share: float, factor: float) -> SimulatedFault:
    def changing(generator: random.Random) -> Change:
        return lambda repeat, _: with_slow(repeat, [generator.random() < share for _ in repeat.tpots], factor)

    name = f"{share:.0%} of requests {factor:g} times as slow"
    return SimulatedFault(name, latency.NAME, functools.partial(statuses, changing=changing))


def with_slow(repeat: Repeat, slow: Sequence[bool], factor: float) -> Repeat:
    if not any(slow):
        return repeat
    tokens = max(1, repeat.output_tokens // max(1, repeat.requests) - 1)
    tpots = tuple(tpot * factor if hit else tpot for tpot, hit in zip(repeat.tpots, slow, strict=True))
    ends = [ttft + tpot * tokens for ttft, tpot in zip(repeat.ttfts, tpots, strict=True)]
    return replace(
        repeat,
        tpots=tpots,
        duration=max(repeat.duration, *ends),
        itl_p999=max(repeat.itl_p999 or 0.0, *tpots),
    )


@dataclass
class RecordedRepeats:
    """Stands for `Repeats`: each block is a recorded one, of which the artifact's repeat gets the fault."""

    verdict: Verdict
    random: random.Random
    change: Change
    now: float = 0.0
    """The simulated clock, in seconds."""
    drawn: dict[int, Block] = field(default_factory=dict)
    """By seed of a repeat: both sides of a block send the same."""

    def __post_init__(self) -> None:
        levels = self.verdict.evidence.measured
        self.blocks = {level.m: [block for block in level.blocks if not block.errors] for level in levels}
        self.warmups = {level.m: level.warmups for level in levels}

    def __call__(self, endpoint: Endpoint, spec: WorkloadSpec) -> Repeat:
        if spec.seed not in self.drawn:
            short = spec.output_len < self.verdict.workload.output_len
            self.drawn[spec.seed] = self.random.choice((self.warmups if short else self.blocks)[spec.m])
        block = self.drawn[spec.seed]
        repeat = (block.artifact if endpoint is ARTIFACT else block.baseline)[0]
        repeat = replace(repeat, seed=spec.seed, began=self.now)
        if endpoint is ARTIFACT:
            repeat = self.change(repeat, self.now)
        self.now += repeat.duration + BETWEEN_S
        return repeat

    def monotonic(self) -> float:
        return self.now


@dataclass(frozen=True)
class SimulatedServers(interleaving.Servers):
    """Servers whose repeats run at once on a clock that is simulated."""

    recorded: RecordedRepeats | None = None

    def run_together(self, level: MeasuredM) -> None:
        assert self.recorded is not None
        seed = interleaving.SEEDS_PER_M // 2 + len(level.blocks)
        spec = interleaving.workload_spec(self.workload, level.m, self.text, seed)
        began = self.recorded.now
        ours = self.recorded(self.artifact, spec)
        self.recorded.now = began
        theirs = self.recorded(self.baseline, spec)
        self.recorded.now = began + max(ours.duration, theirs.duration) + BETWEEN_S
        level.blocks.append(Block([ours], [theirs]))


def statuses(
    verdict: Verdict, generator: random.Random, changing: Callable[[random.Random], Change]
) -> dict[str, str]:
    """Of each check that reads repeats, in one simulated run.

    changing: draws what is random for a whole run
    """
    recorded = RecordedRepeats(verdict, generator, changing(generator))
    run = gate.GateRun(verdict.workload, verdict.bounds, [0], None, QUIET)  # type: ignore[arg-type]
    servers = SimulatedServers(
        ARTIFACT,
        BASELINE,
        verdict.workload,
        run.text,
        recorded,
        recorded=recorded,  # type: ignore[arg-type]
    )
    with mock.patch.object(gate, "time", recorded):
        measured, decisions = interleaving.measure(servers, verdict.bounds, QUIET)
        throughput = {decision.status for decision in decisions}
        together = None if "fail" in throughput else gate.serve_together(servers, measured, run)
    results = (
        stalls.check_stalls(measured, verdict.bounds, together),
        latency.check_latency(measured, verdict.bounds),
    )
    worst = next(status for status in ("fail", "inconclusive", "pass") if status in throughput)
    return {result.name: result.status for result in results} | {"throughput": worst}


def unchanged(_: random.Random) -> Change:
    return lambda repeat, began: repeat


FAULTS = [
    SimulatedFault("none, in repeats", "", functools.partial(statuses, changing=unchanged)),
    *(pauses(every, seconds) for every, seconds in PAUSES),
    *(slow_requests(share, factor) for share, factor in SLOW),
]
