"""The sequential decision: its error rates under clean, heavy-tailed, drifting and correlated noise."""

import math
import random
from collections import Counter

import pytest
from scalegate.serving_check.statistics import (
    SequentialTest,
    block_log_ratio,
    block_order,
    decide,
    interval,
    student_t_quantile,
)

MS = 6
RUNS = 200
FLOOR = 0.93


@pytest.mark.parametrize(
    ("freedom", "upper_tail", "expected"),
    [
        (1, 0.05, 6.313752),
        (2, 0.01, 6.964557),
        (5, 0.025, 2.570582),
        (8, 0.001, 4.500791),
        (23, 0.05, 1.713872),
    ],
)
def test_t_quantiles_are_those_of_the_tables(freedom, upper_tail, expected):
    assert student_t_quantile(upper_tail, freedom) == pytest.approx(expected, abs=1e-5)


class Machine:
    """Throughputs of interleaved repeats on a machine with the noise named.

    gaussian: independent; heavy: Student's t with 2.5 degrees; bursts: one repeat in forty at half speed;
    drift: it slows by a third over the run; correlated: a slow minute and a fast one (AR(1), 0.9)
    """

    def __init__(self, noise: str, scale: float, generator: random.Random):
        self.noise, self.scale, self.random = noise, scale, generator
        self.repeats, self.state = 0, 0.0

    def throughput(self, speed: float) -> float:
        self.repeats += 1
        return speed * math.exp(self._log_noise())

    def _log_noise(self) -> float:
        gauss = self.random.gauss(0, 1)
        if self.noise == "heavy":
            return self.scale * gauss / math.sqrt(self.random.gammavariate(1.25, 0.8))
        if self.noise == "bursts":
            return self.scale * gauss - (math.log(2) if self.random.random() < 0.025 else 0.0)
        if self.noise == "drift":
            return self.scale * gauss - 0.4 * self.repeats / 60
        if self.noise == "correlated":
            self.state = 0.9 * self.state + math.sqrt(1 - 0.81) * 4 * self.scale * gauss
            return self.state
        return self.scale * gauss


def verdict_of(ratios: dict[int, float], noise: str, scale: float, generator: random.Random) -> str:
    """The throughput verdict of one whole simulated run over these true ratios."""
    test = SequentialTest(floor=FLOOR, number_of_ms=len(ratios))
    statuses = []
    for ratio in ratios.values():
        machine, logs = Machine(noise, scale, generator), []
        while not (decision := decide(logs, test)).final:
            speeds = {"A": [], "B": []}
            for side in block_order(len(logs)):
                speeds[side].append(machine.throughput(ratio if side == "A" else 1.0))
            logs.append(block_log_ratio(speeds["A"], speeds["B"]))
        statuses.append(decision.status)
    return "fail" if "fail" in statuses else "inconclusive" if "inconclusive" in statuses else "pass"


def rates(ratios: dict[int, float], noise: str, scale: float, runs: int = RUNS) -> Counter[str]:
    generator = random.Random(f"{noise} {scale} {ratios}")
    return Counter(verdict_of(ratios, noise, scale, generator) for _ in range(runs))


NOISES = [("gaussian", 0.05), ("heavy", 0.03), ("bursts", 0.03), ("drift", 0.04), ("correlated", 0.03)]
SAME = dict.fromkeys((1, 2, 4, 8, 16, 32), 1.0)
SLOWED = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1 / 1.15, 16: 1 / 1.15, 32: 1 / 1.15}


@pytest.mark.parametrize(("noise", "scale"), NOISES)
def test_a_model_never_fails_against_itself(noise, scale):
    counts = rates(SAME, noise, scale)
    assert counts["fail"] == 0
    # The control: with so much noise it is still decided, not waved through as inconclusive.
    assert counts["pass"] > RUNS / 2


@pytest.mark.parametrize(("noise", "scale"), NOISES)
def test_a_copy_slowed_by_15_percent_from_m_8_never_passes(noise, scale):
    counts = rates(SLOWED, noise, scale)
    assert counts["pass"] == 0
    assert counts["fail"] > RUNS / 2


@pytest.mark.parametrize(("noise", "scale"), NOISES)
def test_exactly_at_the_floor_either_error_stays_within_five_percent(noise, scale):
    counts = rates(dict.fromkeys(range(1, MS + 1), FLOOR), noise, scale, runs=150)
    # Three standard deviations of 150 draws at 5% are 0.053.
    assert counts["fail"] / 150 <= 0.05 + 0.04
    # For the pass the worst case is one M at the floor and the others clear of it.
    counts = rates({1: FLOOR} | dict.fromkeys(range(2, MS + 1), 1.5), noise, scale, runs=150)
    assert counts["pass"] / 150 <= 0.05 + 0.04


def test_looking_after_every_block_without_correction_would_err_far_more_often():
    """The control for the corrections: plain 95% intervals, stopped at the first that excludes the floor."""
    generator = random.Random(0)
    wrong = 0
    for _ in range(200):
        logs: list[float] = []
        for _ in range(15):
            logs.append(math.log(FLOOR) + generator.gauss(0, 0.05))
            low, high = interval(logs, 0.025, 0.025)
            if len(logs) >= 3 and (low >= math.log(FLOOR) or high < math.log(FLOOR)):
                wrong += 1
                break
    assert wrong / 200 > 0.1


def test_a_decision_once_reached_stands_whatever_comes_after():
    test = SequentialTest(floor=FLOOR, number_of_ms=1)
    good = [0.001, -0.001, 0.0]
    assert decide(good, test).status == "pass"
    assert decide([*good, *[-1.0] * 10], test).status == "pass"


def test_a_clear_ratio_is_decided_at_the_first_look_and_a_borderline_one_never():
    test = SequentialTest(floor=FLOOR, number_of_ms=MS, max_blocks=6)
    fast = decide([0.5, 0.51, 0.49], test)
    assert (fast.status, fast.blocks, fast.final) == ("pass", 3, True)
    border = [math.log(FLOOR) + 0.03 * (-1) ** index for index in range(6)]
    assert not decide(border[:5], test).final
    last = decide(border, test)
    assert (last.status, last.final) == ("inconclusive", True)


def test_nothing_is_claimed_of_no_blocks_and_of_one():
    test = SequentialTest(floor=FLOOR, number_of_ms=MS)
    assert decide([], test).status == "inconclusive"
    one = decide([0.5], test)
    assert (one.status, one.low, one.high) == ("inconclusive", 0.0, math.inf)


def test_a_linear_drift_cancels_within_a_block():
    speeds = {"A": [], "B": []}
    for position, side in enumerate(block_order(0)):
        speeds[side].append(math.exp(-0.2 * position))
    assert block_log_ratio(speeds["A"], speeds["B"]) == pytest.approx(0.0, abs=1e-12)


def test_one_burst_widens_the_interval_little_once_extremes_are_trimmed():
    calm = [0.01 * (-1) ** index for index in range(12)]
    low, high = interval(calm, 0.01, 0.01)
    burst_low, burst_high = interval([*calm[:11], -2.0], 0.01, 0.01)
    assert burst_high - burst_low < 1.5 * (high - low)


def test_looks_are_few_and_end_at_the_last_block():
    assert SequentialTest(FLOOR, MS, max_blocks=15).looks == (3, 4, 6, 8, 11, 15)
    assert SequentialTest(FLOOR, MS, max_blocks=2).looks == (2,)
