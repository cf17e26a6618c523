"""How often the throughput decision is right where servers take turns, and after how many groups of blocks.

    python -P tests/bench/gate/turns_characteristic.py --runs 1000 [--only errors]

Group after group, as `serving_check/gate/turns.py` measures them and with its decision, of servers that
are random numbers, at three Ms, floor 0.93. A block's log ratio has gaussian noise, and each start makes a
server faster or slower, by 0.5% unless a row says otherwise. A group lasts some 40 s, most of them a start,
so what correlates groups is the machine:

    both sides, walk     the machine's, which is both sides', walks at random from turn to turn
    one side, walk       the artifact's own on this machine walks from group to group, from 0 at first
    one side, AR         it is an autoregression of that correlation from group to group
    one side, wave       it swings once in ten groups
    bad starts           one start in ten makes a server a tenth slower

`scale` is the standard deviation of a step or a state, a start or a wave. Between machines and days a ratio
of Qwen3-8B has differed by 0.4 to 2.2% (`engines_log.md`): that a machine changes sides' speeds against each
other by 2% within minutes is already much.

`decided` has the shares of runs that had ended in a verdict after so many groups. `errors`: how often does
the verdict pass where one M is at 0.90, or exactly at the floor, and the others are clear of it (the worst
case for a wrong pass)? And what becomes of one at 1.0 at every M? Exit status 1 where a bar is missed: a pass
at 0.90 in over 2%, at the floor in over 5%, a fail at 1.0 in over 1%.
"""

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.serving_check.statistics.decide import GROUP, SequentialTest, decide_all

RESULT = Path(__file__).parents[1] / "results" / "gate" / "turns_characteristic.json"
MS, FLOOR, CLEAR = 3, 0.93, 1.5
START, BLOCK = 0.005, 0.02
RATIOS, SPREADS = (0.85, 0.93, 1.0, 1.15), (0.01, 0.03, 0.05)
AFTER = (4, 6, 8, 10, 12, 16)
CASES = {"one M at 0.90": 0.90, "one M at the floor": FLOOR, "all at 1.0": 1.0}
BOTH_WALK, WALK, WAVE, BAD_STARTS, STARTS = (
    "both sides, walk", "one side, walk", "one side, wave", "bad starts", "starts",
)  # fmt: skip
AR = "one side, AR "
MACHINES = [
    (STARTS, START),
    (STARTS, 0.02),
    (BAD_STARTS, 0.10),
    (BOTH_WALK, 0.05),
    (WALK, 0.002),
    (WALK, 0.01),
    (WALK, 0.03),
    (f"{AR}.5", 0.02),
    (f"{AR}.8", 0.01),
    (f"{AR}.8", 0.02),
    (f"{AR}.8", 0.05),
    (WAVE, 0.02),
]
MOST_WRONG = {
    ("one M at 0.90", "pass"): 0.02,
    ("one M at the floor", "pass"): 0.05,
    ("all at 1.0", "fail"): 0.01,
}
WAVE_GROUPS = 10


class Machine:
    """What it does to the two sides' log speeds, from turn to turn."""

    def __init__(self, kind: str, scale: float, generator: random.Random):
        self.kind, self.scale, self.random = kind, scale, generator
        self.phase = generator.uniform(0, 2 * math.pi)
        self.alone: list[float] = []
        self.turns: dict[tuple[str, int], float] = {}

    def start(self) -> float:
        bad = self.kind == BAD_STARTS and self.random.random() < 0.1
        scale = self.scale if self.kind == STARTS else START
        return scale * self.random.gauss(0, 1) - self.scale * bad

    def log_speed(self, side: str, group: int) -> float:
        if self.kind == BOTH_WALK and (side, group) not in self.turns:
            last = next(reversed(self.turns.values()), 0.0)
            self.turns[side, group] = last + self.scale * self.random.gauss(0, 1)
        while len(self.alone) <= group:
            self.alone.append(self._next())
        return self.turns.get((side, group), 0.0) + (self.alone[group] if side == "artifact" else 0.0)

    def _next(self) -> float:
        gauss = self.scale * self.random.gauss(0, 1)
        if self.kind == WALK:
            return self.alone[-1] + gauss if self.alone else 0.0
        if self.kind.startswith(AR):
            rho = float(self.kind.removeprefix(AR))
            return rho * self.alone[-1] + math.sqrt(1 - rho**2) * gauss if self.alone else gauss
        if self.kind == WAVE:
            angle = 2 * math.pi * len(self.alone) / WAVE_GROUPS + self.phase
            return self.scale * math.sqrt(2) * math.sin(angle)
        return 0.0


def verdict(ratios: Sequence[float], block: float, machine: Machine) -> tuple[str, int]:
    """On these ratios, one an M, and after how many groups of blocks."""
    test = SequentialTest(FLOOR, len(ratios)).of_turns
    series: list[list[float]] = [[] for _ in ratios]
    decisions = decide_all(series, test)
    up, started, order = "", 0.0, ["baseline", "artifact"]
    for group in range(test.max_blocks):
        speeds = {}
        for side in order:
            # A side that ended a group begins the next one.
            up, started = side, started if up == side else machine.start()
            speeds[side] = started + machine.log_speed(side, group)
        order.reverse()
        for values, ratio, decision in zip(series, ratios, decisions, strict=True):
            if not decision.final:
                noise = block / math.sqrt(GROUP) * machine.random.gauss(0, 1)
                values.append(math.log(ratio) + speeds["artifact"] - speeds["baseline"] + noise)
        if group + 1 in test.looks:
            decisions = decide_all(series, test)
            if all(decision.final for decision in decisions) or any(
                decision.status == "fail" for decision in decisions
            ):
                break
    statuses = {decision.status for decision in decisions}
    return next(status for status in ("fail", "inconclusive", "pass") if status in statuses), group + 1


def decided_row(ratio: float, block: float, runs: int) -> dict[str, Any]:
    """Shares of the verdicts on this ratio at every M, and of those that are given by then."""
    generator = random.Random(f"{ratio} {block}")
    found = [verdict([ratio] * MS, block, Machine(STARTS, START, generator)) for _ in range(runs)]
    decided = [groups for status, groups in found if status != "inconclusive"]
    return {
        "ratio": ratio,
        "block": block,
        "runs": runs,
        **shares([status for status, _ in found]),
        "after": {str(most): sum(groups <= most for groups in decided) / runs for most in AFTER},
    }


def error_row(kind: str, scale: float, runs: int) -> dict[str, Any]:
    row: dict[str, Any] = {"machine": kind, "scale": scale, "block": BLOCK, "runs": runs}
    for case, first in CASES.items():
        generator = random.Random(f"{kind} {scale} {case}")
        others = first if case.startswith("all") else CLEAR
        ratios = [first] + [others] * (MS - 1)
        found = [verdict(ratios, BLOCK, Machine(kind, scale, generator)) for _ in range(runs)]
        groups = sum(groups for _, groups in found) / runs
        row[case] = shares([status for status, _ in found]) | {"groups": round(groups, 1)}
    return row


def shares(statuses: Sequence[str]) -> dict[str, float]:
    counts = Counter(statuses)
    return {status: counts[status] / len(statuses) for status in ("pass", "fail", "inconclusive")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000, help="of each case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=("decided", "errors"))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    table: dict[str, Any] = {"floor": FLOOR, "ms": MS, "start": START}
    missed: list[str] = []
    with ProcessPoolExecutor(options.processes) as pool:
        if options.only != "errors":
            cells = [(ratio, block, options.runs) for ratio in RATIOS for block in SPREADS]
            table["decided"] = []
            for row in pool.map(decided_row, *zip(*cells, strict=True)):
                table["decided"].append(row)
                print(decided_line(row), flush=True)
        if options.only != "decided":
            table["errors"] = []
            for row in pool.map(error_row, *zip(*MACHINES, strict=True), [options.runs] * len(MACHINES)):
                table["errors"].append(row)
                missed += missed_bars(row)
                print(error_line(row), flush=True)
    write_json(options.out, table)
    if missed:
        sys.exit("\n".join(missed))


def decided_line(row: dict[str, Any]) -> str:
    after = "  ".join(f"{groups}: {share:.2f}" for groups, share in row["after"].items())
    verdicts = f"{row['pass']:.2f} pass, {row['fail']:.2f} fail"
    return f"ratio {row['ratio']:.2f}, blocks {row['block']:.0%}: {verdicts}  {after}"


def error_line(row: dict[str, Any]) -> str:
    cells = [
        f"{case}: {cell['pass']:.3f} pass, {cell['fail']:.3f} fail, {cell['groups']} groups"
        for case in CASES
        for cell in [row[case]]
    ]
    return f"{row['machine']:18} {row['scale']:.3f}  " + "  ".join(cells)


def missed_bars(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['machine']} {row['scale']}, {case}: {status} in {row[case][status]:.1%}, bar {bar:.0%}"
        for (case, status), bar in MOST_WRONG.items()
        if row[case][status] > bar
    ]


if __name__ == "__main__":
    main()
