"""Tails against tables."""

import pytest
from scalegate.serving_check.statistics.goodness_of_fit import chi_square, chi_square_chance, normal_chance


@pytest.mark.parametrize(("z", "chance"), [(0.0, 1.0), (1.959964, 0.05), (-3.290527, 0.001)])
def test_normal_chances_are_of_both_sides(z: float, chance: float):
    assert normal_chance(z) == pytest.approx(chance, rel=1e-5)


@pytest.mark.parametrize(
    ("freedom", "statistic", "chance"),
    [
        (1, 3.841459, 0.05),
        (2, 5.991465, 0.05),
        (10, 18.307038, 0.05),
        (19, 30.143527, 0.05),
        (19, 43.820196, 0.001),
    ],
)
def test_chi_square_chances_are_those_of_the_tables(freedom: int, statistic: float, chance: float):
    assert chi_square_chance(statistic, freedom) == pytest.approx(chance, rel=1e-5)


def test_what_fits_exactly_is_likely_and_what_never_fits_is_not():
    assert chi_square((5, 5, 5)) == 0.0 and chi_square_chance(0.0, 2) == 1.0
    assert chi_square((9, 3, 3)) == pytest.approx(16 / 5 + 4 / 5 + 4 / 5)
    assert chi_square_chance(1e5, 19) == 0.0
