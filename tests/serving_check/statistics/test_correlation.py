"""The correlation between neighbouring blocks: estimated without the bias of few values, and paid for."""

import itertools
import math
import random

import pytest
from scalegate.serving_check.statistics.correlation import (
    LARGEST,
    autoregression,
    random_walk,
    upper_correlation,
)


def series(rho: float, count: int, generator: random.Random) -> list[float]:
    """A stationary autoregression; a random walk at rho 1."""
    values = [generator.gauss(0, 1)]
    step = math.sqrt(1 - rho**2) if rho < 1 else 1.0
    while len(values) < count:
        values.append(rho * values[-1] + step * generator.gauss(0, 1))
    return values


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(("count", "rho"), [(6, 0.0), (6, 0.8), (20, 0.5), (48, 0.9)])
def test_cost_and_lag_are_those_of_simulated_series(count, rho):
    generator = random.Random(count)
    runs = [series(rho, count, generator) for _ in range(4000)]
    squares = mean([sum((value - mean(run)) ** 2 for value in run) for run in runs])
    products = mean(
        [sum((a - mean(run)) * (b - mean(run)) for a, b in itertools.pairwise(run)) for run in runs]
    )
    variance_of_mean = mean([mean(run) ** 2 for run in runs])
    expected = autoregression(count, rho)
    assert expected.lag_one == pytest.approx(products / squares, abs=0.02)
    assert expected.cost == pytest.approx(variance_of_mean / (squares / (count - 1) / count), rel=0.12)


@pytest.mark.parametrize("count", [4, 6, 16])
def test_a_walks_cost_is_that_of_simulated_walks_from_their_first_value(count):
    generator = random.Random(count)
    walks = [
        list(itertools.accumulate([0.0, *(generator.gauss(0, 1) for _ in range(count - 1))]))
        for _ in range(4000)
    ]
    variances = [sum((value - mean(walk)) ** 2 for value in walk) / (count - 1) for walk in walks]
    expected = random_walk(count)
    assert expected.cost == pytest.approx(
        mean([mean(walk) ** 2 for walk in walks]) / mean(variances) * count, rel=0.1
    )
    spread = mean([variance**2 for variance in variances]) / mean(variances) ** 2 - 1
    assert expected.freedom < 2 / spread + 0.3
    assert expected.cost < autoregression(count, LARGEST).cost / 4


def test_independent_values_cost_nothing_extra():
    none = autoregression(12, 0.0)
    assert (none.cost, none.freedom) == (pytest.approx(1), pytest.approx(11))
    assert none.lag_one < 0, "deviations from the values' own mean repel each other"


@pytest.mark.parametrize(("rho", "count"), [(0.0, 8), (0.5, 8), (0.8, 8), (0.5, 40), (0.8, 40)])
def test_the_upper_limit_is_above_the_truth_nearly_always(rho, count):
    generator = random.Random(1)
    found = [upper_correlation([series(rho, count, generator) for _ in range(6)]) for _ in range(200)]
    assert mean([value >= rho for value in found]) > 0.8
    # The control: it is a limit, not a shrug.
    assert count < 40 or mean(found) < rho + 0.2


def test_a_random_walk_looks_like_the_largest_correlation():
    generator = random.Random(2)
    found = [upper_correlation([series(1, 24, generator) for _ in range(6)]) for _ in range(50)]
    assert mean([value > 0.9 for value in found]) > 0.9


def test_nothing_is_known_of_single_values():
    assert upper_correlation([]) == upper_correlation([[1.0], [2.0]]) == LARGEST
