"""How often the gate's throughput decision is right: its error rates under every kind of noise we know of.

    python -P tests/bench/gate/operating_characteristic.py --runs 1000 [--noise gaussian ...] [--seconds 240]

The gate's own measuring loop (`serving_check/gate/interleaving.py`) on servers that are random numbers. Each
repeat's throughput has noise of its own, gaussian, with heavy tails (Student's t, 2.5 degrees) or with bursts
(one repeat in forty at half speed); or the artifact's server quickens and slows from one block to the next,
as an autoregression (AR) or as a random walk. `noise` is the standard deviation of one repeat, or of one step
of the walk; a repeat at a drawn M is a quarter as long, and has twice the noise of its own. Floor 0.93, M = 1
to 32 and those that a fresh seed draws between them in every run. Then comes the load as in use, of which a
block has the noise of a repeat, and each M in it twice as much of its own, as a drawn M has: `in_use_failed`
says how often it failed.

Five questions a row. How often does the verdict pass where one given M is at 0.90, or exactly at the floor,
and the others are clear of it (the worst case for a wrong pass)? How often where tokens take twice as long at
one drawn M, beside prompts that take 30% of the time? What becomes of one at 1.0 at every M? And of one that
is at 0.7 in use alone?
The runs are simulated in batches with seeds of their own, and a call goes on from the batches that OUT has.
Delete OUT to begin anew. A share is of a limited number of runs, so a bar is missed where the share is surely
beyond it: where so many runs, or more, would have less than a 2.5% chance if the true share were the bar.
Exit status 1 where a bar is missed: a pass at 0.90 in over 2%, at the floor in over 5%, at a drawn M that is
twice as slow in over 1%, a fail at 1.0 in over 1%, and fewer than 80% of passes at 1.0 with 10% gaussian
noise.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.base.stage_clock import StageClock
from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.checks.in_use.speed import LEAST_GAPS, check_speed_in_use, scatter_of
from scalegate.serving_check.evidence.in_use import BlockInUse, SideInUse
from scalegate.serving_check.evidence.measurement import MeasuredM, Repeat
from scalegate.serving_check.gate import interleaving
from scalegate.serving_check.gate.in_use import BLOCKS
from scalegate.serving_check.settings import SHORTER, Bounds, WorkloadSettings
from scalegate.serving_check.statistics.decide import Decision, chance_of_as_many
from scalegate.serving_check.workload import RequestRecord, WorkloadResult, WorkloadSpec

QUIET = StageClock(shown=False)
RESULT = Path(__file__).parents[1] / "results" / "gate" / "operating_characteristic.json"
ARTIFACT, BASELINE = Endpoint("http://artifact", "artifact"), Endpoint("http://baseline", "baseline")
WORKLOAD = WorkloadSettings(input_len=1, output_len=64, draws_between=True)
FLOOR = 0.93
CLEAR = 1.5
TWICE_AS_SLOW = 1 / (0.3 + 2 * 0.7)
"""Of the throughput, where decoding takes twice as long and prompts 30% of the time."""
ALL_SOUND = "all at 1.0"
CASES = {
    "one M at 0.90": (0.90, CLEAR),
    "one M at the floor": (FLOOR, CLEAR),
    "a drawn M twice as slow": (TWICE_AS_SLOW, CLEAR),
    ALL_SOUND: (1.0, 1.0),
}
OF_A_DRAWN_M = "a drawn M twice as slow"
IN_USE = 0
"""Stands for the load as in use among the Ms."""
ONLY_IN_USE = "0.7 in use"
"""The curve of `all at 1.0`, with a load as in use at this ratio."""
SLOW_IN_USE = 0.7
PROMPT_S, TOKEN_S = 0.05, 0.01
IN_USE_MS = range(1, WORKLOAD.ms[-1] + 1)
BOUNDS = Bounds(throughput_floor=FLOOR)
ROWS = [
    *(("gaussian", noise) for noise in (0.02, 0.05, 0.10, 0.15, 0.20)),
    *(("heavy tails", noise) for noise in (0.03, 0.10)),
    *(("bursts", noise) for noise in (0.03, 0.10)),
    *(("AR .5", noise) for noise in (0.02, 0.05, 0.10)),
    *(("AR .8", noise) for noise in (0.02, 0.05, 0.10)),
    *(("random walk", noise) for noise in (0.01, 0.03, 0.10)),
]
MOST_WRONG = {
    ("one M at 0.90", "pass"): 0.02,
    ("one M at the floor", "pass"): 0.05,
    (OF_A_DRAWN_M, "pass"): 0.01,
    (ALL_SOUND, "fail"): 0.01,
}
LEAST_PASSED = {("gaussian", 0.10): 0.80}
BATCH = 10
"""Number of runs of each case that are simulated together."""
SURE = 0.025
"""The chance below which a bar is surely missed."""


@dataclass
class Servers:
    """Stands for `Repeats`: a baseline of 100 tok/s, an artifact at `ratios[M]` of it."""

    ratios: dict[int, float]
    noise: str
    scale: float
    random: random.Random

    def __post_init__(self) -> None:
        self.walks = {m: self._walk() for m in (*self.ratios, IN_USE)}

    def __call__(self, endpoint: Endpoint, spec: WorkloadSpec) -> Repeat:
        noisier = 1.0 if spec.m in WORKLOAD.ms else SHORTER**0.5
        duration = spec.output_len / 100 / self._speed(endpoint is ARTIFACT, spec.m, noisier)
        return replace(repeat_of(spec.m, spec.output_len), duration=duration)

    def blocks_in_use(self, ratio: float) -> list[BlockInUse]:
        """A load as in use, of an artifact's server at this ratio."""
        self.ratios[IN_USE] = ratio
        return [BlockInUse(1, self._in_use(True), self._in_use(False)) for _ in range(BLOCKS)]

    def _in_use(self, is_artifact: bool) -> SideInUse:
        """One side of a block: everything takes as much longer as the server is slower."""
        slower = 1 / self._speed(is_artifact, IN_USE)
        token = TOKEN_S * slower
        at_ms = {m: token * math.exp(SHORTER**0.5 * self._own_noise()) for m in IN_USE_MS}
        return SideInUse(
            began=0.0,
            duration=slower,
            output_tokens=1000,
            ttfts=(PROMPT_S * slower,),
            tpots=(token,),
            itls_by_m={m: (LEAST_GAPS, seconds) for m, seconds in at_ms.items()},
            itl_p99=token,
        )

    def _speed(self, is_artifact: bool, m: int, noisier: float = 1.0) -> float:
        log_speed = noisier * self._own_noise()
        if is_artifact:
            log_speed += math.log(self.ratios[m]) + next(self.walks[m])
        return math.exp(log_speed)

    def _own_noise(self) -> float:
        gauss = self.random.gauss(0, 1)
        if self.noise == "gaussian":
            return self.scale * gauss
        if self.noise == "heavy tails":
            return self.scale * gauss / math.sqrt(self.random.gammavariate(1.25, 0.8))
        if self.noise == "bursts":
            return self.scale * gauss - (math.log(2) if self.random.random() < 0.025 else 0.0)
        return 0.0

    def _walk(self) -> Iterator[float]:
        """What the artifact's server adds to its log speed, block by block."""
        state = 0.0
        if self.noise.startswith("AR"):
            rho = float(self.noise.removeprefix("AR "))
            state = self.scale * self.random.gauss(0, 1)
            while True:
                yield state
                state = rho * state + math.sqrt(1 - rho**2) * self.scale * self.random.gauss(0, 1)
        while True:
            yield state
            if self.noise == "random walk":
                state += self.scale * self.random.gauss(0, 1)


@cache
def repeat_of(m: int, output_len: int) -> Repeat:
    """One that takes a second. No time to the first token: whole requests are all that is judged."""
    spec = WorkloadSpec(m, 1, 1, output_len, 0, (0,))
    request = RequestRecord(0.0, 0.0, (), 1.0, output_len, 1)
    return Repeat.of(WorkloadResult(spec, 1.0, (request,), (), {m: 1}, None))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000, help="of each case in each row")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--noise", nargs="+", choices=sorted({noise for noise, _ in ROWS}))
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no batch begins")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = kept_rows(options.out)
    missing = [
        (noise, scale, batch)
        for batch in range(math.ceil(options.runs / BATCH))
        for noise, scale in ROWS
        if not options.noise or noise in options.noise
        if batch * BATCH >= (rows[noise, scale]["runs"] if (noise, scale) in rows else 0)
    ]
    began = time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        for start in range(0, len(missing), options.processes):
            if time.monotonic() - began > options.seconds:
                break
            together = missing[start : start + options.processes]
            for row in pool.map(simulate, *zip(*together, strict=True)):
                key = row["noise"], row["scale"]
                rows[key] = added(rows[key], row) if key in rows else row
            rows = {key: rows[key] for key in ROWS if key in rows}
            write_json(options.out, {"floor": FLOOR, "rows": list(rows.values())})
    print("\n".join(map(sentence, rows.values())))
    missed = [miss for row in rows.values() for miss in missed_bars(row)]
    if missed:
        sys.exit("\n".join(missed))


def kept_rows(path: Path) -> dict[tuple[str, float], dict[str, Any]]:
    """Those of earlier calls, by noise and scale."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["noise"], row["scale"]): row for row in rows}


def simulate(noise: str, scale: float, batch: int) -> dict[str, Any]:
    """Return how many runs of one batch ended in which verdict in each case, and the blocks an M that they
    took.
    """
    row: dict[str, Any] = {"noise": noise, "scale": scale, "runs": BATCH}
    for case, (first, others) in CASES.items():
        generator = random.Random(f"{noise} {scale} {case} {batch}")
        ratios_in_use = {case: others}
        if case == ALL_SOUND:
            ratios_in_use[ONLY_IN_USE] = SLOW_IN_USE
        tallies = {name: Tally() for name in ratios_in_use}
        for _ in range(BATCH):
            load = replace(WORKLOAD, seed=generator.randrange(2**31))
            slow = (load.ms_between if case == OF_A_DRAWN_M else load.ms)[0]
            ratios = {m: first if m == slow else others for m in load.measured_ms}
            servers = Servers(ratios, noise, scale, generator)
            sides = interleaving.Servers(ARTIFACT, BASELINE, load, [0], servers)
            measured, decisions = interleaving.measure(sides, BOUNDS, QUIET)
            for name, ratio in ratios_in_use.items():
                tallies[name].add(measured, decisions, servers.blocks_in_use(ratio))
        row |= {name: tally.counts() for name, tally in tallies.items()}
    return row


def added(row: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two rows of one noise."""
    cases = {
        case: {name: round(row[case][name] + count, 1) for name, count in more[case].items()}
        for case in (*CASES, ONLY_IN_USE)
    }
    return {**row, "runs": row["runs"] + more["runs"], **cases}


@dataclass
class Tally:
    """The verdicts of one case."""

    verdicts: Counter[str] = field(default_factory=Counter)
    in_use_failed: int = 0
    blocks_per_m: float = 0.0
    """The mean over the Ms, summed over the verdicts."""

    def add(
        self, measured: Sequence[MeasuredM], decisions: Sequence[Decision], in_use: Sequence[BlockInUse]
    ) -> None:
        statuses: set[str] = {decision.status for decision in decisions}
        if "fail" not in statuses:
            statuses.add(check_speed_in_use(in_use, BOUNDS, scatter_of(measured)).status)
            self.in_use_failed += "fail" in statuses
        self.verdicts[next(status for status in ("fail", "inconclusive", "pass") if status in statuses)] += 1
        self.blocks_per_m += fmean(len(level.blocks) for level in measured)

    def counts(self) -> dict[str, float]:
        verdicts = {status: self.verdicts[status] for status in ("pass", "fail", "inconclusive")}
        blocks = round(self.blocks_per_m, 1)
        return verdicts | {"in_use_failed": self.in_use_failed, "blocks_per_m": blocks}


def sentence(row: dict[str, Any]) -> str:
    runs = row["runs"]
    cells = [
        f"{case}: {cell['pass'] / runs:.3f} pass, {cell['fail'] / runs:.3f} fail, "
        f"{cell['blocks_per_m'] / runs:.1f} blocks"
        for case in (*CASES, ONLY_IN_USE)
        for cell in [row[case]]
    ]
    return f"{row['noise']:12} {row['scale']:.2f}  {runs} runs  " + "  ".join(cells)


def missed_bars(row: dict[str, Any]) -> list[str]:
    name, runs = f"{row['noise']} {row['scale']}", row["runs"]
    missed = [
        f"{name}, {case}: {status} in {row[case][status] / runs:.1%}, bar {bar:.0%}"
        for (case, status), bar in MOST_WRONG.items()
        if chance_of_as_many_as(row[case][status], runs, bar) < SURE
    ]
    least = LEAST_PASSED.get((row["noise"], row["scale"]), 0.0)
    others = runs - row[ALL_SOUND]["pass"]
    if chance_of_as_many_as(others, runs, 1 - least) < SURE:
        missed.append(f"{name}: passes at 1.0 in {1 - others / runs:.1%}, bar {least:.0%}")
    return missed


def chance_of_as_many_as(count: int, runs: int, share: float) -> float:
    """Return the chance that at least `count` of so many runs are what a share of all runs is."""
    return chance_of_as_many(count, runs - count, share)


if __name__ == "__main__":
    main()
