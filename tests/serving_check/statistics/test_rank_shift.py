"""Shifts between two samples by ranks: what Mann and Whitney's tables say, and how often limits are wrong."""

import math
import random

import pytest
from scalegate.serving_check.statistics.rank_shift import least_shift, shift

CRITICAL = {(5, 5): 1, (6, 6): 3, (6, 8): 6, (8, 8): 9}
"""The largest U with a one-sided probability of at most 1%, from published tables."""


@pytest.mark.parametrize(("sizes", "critical"), CRITICAL.items())
def test_the_limit_has_the_rank_of_the_published_tables(sizes, critical):
    ours, theirs = sizes
    above = [100.0 * 2**index for index in range(ours)]
    below = [float(index) for index in range(theirs)]
    differences = sorted(high - low for high in above for low in below)
    assert least_shift(above, below, 0.01) == differences[critical]


def test_a_shift_is_the_median_difference_whatever_one_value_does():
    assert shift([3.0, 4.0, 5.0], [1.0, 2.0, 3.0]) == 2.0
    assert shift([3.0, 4.0, 1000.0], [1.0, 2.0, 3.0]) == 2.0


def test_too_few_values_have_no_limit():
    assert least_shift([2.0, 3.0], [0.0, 1.0], 0.01) == -math.inf
    assert least_shift([2.0, 3.0], [0.0, 1.0], 0.2) == 1.0


@pytest.mark.parametrize("heavy_tails", [False, True])
def test_the_limit_is_above_the_true_shift_as_seldom_as_it_says(heavy_tails):
    draw = random.Random(7)

    def value() -> float:
        return draw.gauss(0, 1) / (abs(draw.gauss(0, 1)) if heavy_tails else 1.0)

    runs = 4000
    wrong = sum(
        least_shift([0.3 + value() for _ in range(6)], [value() for _ in range(6)], 0.05) > 0.3
        for _ in range(runs)
    )
    # Six and six values reach a level of 4.65% below 5%; its standard error over so many runs is 0.33%.
    assert 0.035 < wrong / runs < 0.058
