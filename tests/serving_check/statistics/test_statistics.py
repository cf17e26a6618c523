"""The sequential decision: its error rates under clean, heavy-tailed, drifting and correlated noise."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from scalegate.serving_check.statistics.decide import (
    TURN_ERROR,
    WIDEST,
    WIDEST_IF_FASTER,
    SequentialTest,
    block_log_ratio,
    block_order,
    decide,
    decide_all,
    is_hopeless,
)
from scalegate.serving_check.statistics.trimmed_mean import interval, student_t_quantile
from scalegate.tests.exhaustive import exhaustive_but

MS = 6
RUNS = 60
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


def machine(noise: str, scale: float, generator: random.Random) -> Iterator[float]:
    """The noise of each block's log ratio.

    heavy: Student's t with 2.5 degrees; bursts: one repeat in forty at half speed; AR: an autoregression;
    walk: a random walk
    """
    state = scale * generator.gauss(0, 1)
    while True:
        gauss = scale * generator.gauss(0, 1)
        if noise == "heavy":
            yield gauss / math.sqrt(generator.gammavariate(1.25, 0.8))
        elif noise == "bursts":
            yield gauss + math.log(2) * ((generator.random() < 0.025) - (generator.random() < 0.025))
        elif noise == "AR":
            yield state
            state = 0.8 * state + 0.6 * gauss
        elif noise == "walk":
            yield state
            state += gauss
        else:
            yield gauss


def verdict_of(ratios: Sequence[float], noise: str, scale: float, generator: random.Random) -> str:
    """The throughput verdict of one whole simulated run over these true ratios."""
    test = SequentialTest(floor=FLOOR, number_of_ms=len(ratios))
    machines = [machine(noise, scale, generator) for _ in ratios]
    series: list[list[float]] = [[] for _ in ratios]
    decisions = decide_all(series, test)
    for look in test.looks:
        for values, ratio, noises, decision in zip(series, ratios, machines, decisions, strict=True):
            while not decision.final and len(values) < look:
                values.append(math.log(ratio) + next(noises))
        decisions = decide_all(series, test)
    statuses = {decision.status for decision in decisions}
    return "fail" if "fail" in statuses else "inconclusive" if "inconclusive" in statuses else "pass"


def rates(ratios: Sequence[float], noise: str, scale: float, runs: int = RUNS) -> Counter[str]:
    generator = random.Random(f"{noise} {scale} {ratios}")
    return Counter(verdict_of(ratios, noise, scale, generator) for _ in range(runs))


NOISES = [("gaussian", 0.07), ("heavy", 0.04), ("bursts", 0.04), ("AR", 0.02), ("walk", 0.03)]
SOME_NOISES = exhaustive_but(NOISES, ("gaussian", 0.07), ("AR", 0.02))
SAME = [1.0] * MS
SLOWED = [1.0] * 3 + [1 / 1.15] * 3


@pytest.mark.parametrize(("noise", "scale"), SOME_NOISES)
def test_a_model_never_fails_against_itself(noise, scale):
    counts = rates(SAME, noise, scale)
    assert counts["fail"] == 0
    # The control: but for the walk it is decided, not waved through as inconclusive.
    assert noise == "walk" or counts["pass"] > RUNS / 2


@pytest.mark.parametrize(("noise", "scale"), SOME_NOISES)
def test_a_copy_slowed_by_15_percent_at_three_ms_never_passes(noise, scale):
    counts = rates(SLOWED, noise, scale)
    assert counts["pass"] == 0
    assert noise == "walk" or counts["fail"] > RUNS / 2


@pytest.mark.parametrize(("noise", "scale"), SOME_NOISES)
def test_exactly_at_the_floor_either_error_stays_within_five_percent(noise, scale):
    # For the pass the worst case is one M at the floor and the others clear of it.
    counts = rates([FLOOR] + [1.5] * (MS - 1), noise, scale)
    # Three standard deviations of 60 draws at 5% are 0.084; the bench draws a thousand.
    assert counts["pass"] / RUNS <= 0.05 + 0.084
    assert counts["fail"] / RUNS <= 0.05 + 0.084


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


def test_correlated_blocks_widen_the_interval():
    values = [0.01 * math.sin(index / 3) for index in range(24)]
    low, high = interval(values, 0.01, 0.01)
    wide_low, wide_high = interval(values, 0.01, 0.01, correlation=0.8)
    assert wide_high - wide_low > 2.5 * (high - low)


def test_a_decision_once_reached_stands_whatever_comes_after():
    test = SequentialTest(floor=FLOOR, number_of_ms=MS)
    good = [[0.001, -0.001, 0.0, 0.0, 0.001, -0.001]] * MS
    assert {decision.status for decision in decide_all(good, test)} == {"pass"}
    slow = [*good[0], *[-1.0] * 30]
    assert decide_all([slow, *good[1:]], test)[0].status == "pass"


def test_a_clear_ratio_is_decided_at_the_first_look_and_a_borderline_one_never():
    test = SequentialTest(floor=FLOOR, number_of_ms=2, max_blocks=11)
    quick = [0.5 + 0.01 * (-1) ** index for index in range(6)]
    border = [math.log(FLOOR) + 0.03 * (-1) ** index for index in range(11)]
    fast, open_ = decide_all([quick, border[:10]], test)
    assert (fast.status, fast.blocks, fast.final) == ("pass", 6, True)
    assert not open_.final
    last = decide_all([quick, border], test)[1]
    assert (last.status, last.final) == ("inconclusive", True)


def test_a_ratio_that_is_hardly_known_does_not_pass_however_high_it_is():
    test = SequentialTest(floor=FLOOR, number_of_ms=2, max_blocks=11)
    swinging = [2.0 + 1.1 * (-1) ** index for index in range(11)]
    decision = decide_all([swinging, swinging], test)[0]
    assert decision.low > FLOOR and decision.shown[1] > WIDEST_IF_FASTER * decision.shown[0]
    assert (decision.status, decision.final) == ("inconclusive", True)


def test_a_wide_interval_passes_only_if_all_of_it_is_faster():
    test = SequentialTest(floor=0.6, number_of_ms=2, max_blocks=8)
    swing = [0.25 * (-1) ** index for index in range(8)]
    slower, faster = ([math.log(ratio) + noise for noise in swing] for ratio in (1.1, 1.6))
    for values, status in ((slower, "inconclusive"), (faster, "pass")):
        decision = decide_all([values, values], test)[0]
        low, high = decision.shown
        assert decision.low > test.floor and WIDEST * low < high < WIDEST_IF_FASTER * low
        assert decision.status == status


def test_a_ratios_width_is_that_of_its_95_percent_interval_not_of_the_decisions_limits():
    values = [math.log(2.0) + noise for noise in (0.08, -0.14, 0.16, -0.11, 0.14, -0.16)]
    decision = decide(values, SequentialTest(floor=FLOOR, number_of_ms=6))
    assert decision.high > WIDEST * decision.low, "looks and Ms widen these"
    assert decision.shown[1] < WIDEST * decision.shown[0]
    assert decision.low < decision.shown[0] < 2.0 < decision.shown[1] < decision.high
    assert decision.status == "pass" and decision.blocks == 6


def test_nothing_is_claimed_of_no_blocks_and_of_one():
    test = SequentialTest(floor=FLOOR, number_of_ms=MS)
    assert decide([], test).status == "inconclusive"
    decision = decide([0.5], test)
    assert (decision.status, decision.low, decision.high) == ("inconclusive", 0.0, math.inf)


def test_a_linear_drift_cancels_over_two_blocks():
    speeds = {"A": [], "B": []}
    for position, side in enumerate(block_order(0) + block_order(1)):
        speeds[side].append(math.exp(-0.2 * position))
    assert block_log_ratio(speeds["A"], speeds["B"]) == pytest.approx(0.0, abs=1e-12)


def test_one_burst_widens_the_interval_little_once_extremes_are_trimmed():
    calm = [0.01 * (-1) ** index for index in range(12)]
    low, high = interval(calm, 0.01, 0.01)
    burst_low, burst_high = interval([*calm[:11], -2.0], 0.01, 0.01)
    assert burst_high - burst_low < 1.5 * (high - low)


def test_looks_are_few_and_end_at_the_last_block():
    assert SequentialTest(FLOOR, MS, max_blocks=15).looks == (6, 7, 8, 9, 11, 13, 15)
    assert SequentialTest(FLOOR, MS, max_blocks=2).looks == (2,)


@pytest.mark.parametrize("max_blocks", [2, 15, 96])
def test_all_looks_together_spend_the_error_once(max_blocks):
    test = SequentialTest(FLOOR, MS, max_blocks)
    assert sum(test.pass_error(blocks) for blocks in test.looks) == pytest.approx(test.error)
    assert sum(test.fail_error(blocks) for blocks in test.looks) == pytest.approx(test.error / MS)


@pytest.mark.parametrize(
    ("max_blocks", "looks"), [(24, (4,)), (40, (4, 6)), (96, (4, 6, 8, 12, 16)), (900, (4, 6, 8, 12, 16))]
)
def test_servers_in_turns_spend_half_of_the_error_that_is_left_at_each_look(max_blocks, looks):
    test = SequentialTest(FLOOR, MS, max_blocks).of_turns
    assert test.looks == looks
    spent = [test.pass_error(groups) for groups in looks]
    assert sum(spent) == pytest.approx(TURN_ERROR) and spent[-2:] == [spent[-1]] * len(spent[-2:])
    assert all(later == pytest.approx(earlier / 2) for earlier, later in itertools.pairwise(spent[:-1]))


def test_limits_of_groups_in_turns_are_never_wider_than_a_random_walks():
    values = [0.01, 0.02, 0.01, 0.02]
    narrow, walk, wide = (
        interval(values, 0.01, 0.01, correlation, at_most_a_walk=True)[0] for correlation in (0.0, 0.8, 0.98)
    )
    assert narrow > walk == wide > interval(values, 0.01, 0.01, 0.98)[0]


@pytest.mark.parametrize(
    ("first_looks", "hopeless"),
    [([-2.3, -2.3], True), ([-2.3, 0.0], False), ([0.0, -2.3], False), ([-2.3], False), ([], False)],
)
def test_hopeless_takes_two_looks_far_below_the_floor(first_looks, hopeless):
    assert is_hopeless(first_looks, FLOOR) is hopeless
