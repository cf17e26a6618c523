"""The chances that tests of goodness of fit compare with their levels: normal and chi-square tails.

The module is pure arithmetic; `checks/in_use/sampling.py` decides by the chances that it returns.
"""

import math


def normal_chance(z: float) -> float:
    """Return the chance that a standard normal number is at least as far from 0 as `z`, on either side."""
    return math.erfc(abs(z) / math.sqrt(2))


def chi_square(counts: tuple[int, ...]) -> float:
    """Return Pearson's statistic of `counts` against equal chances, with one degree of freedom fewer than
    counts.
    """
    expected = sum(counts) / len(counts)
    return math.fsum((count - expected) ** 2 for count in counts) / expected


def chi_square_chance(statistic: float, freedom: int) -> float:
    """Return the chance of at least `statistic` with so many degrees of freedom.

    The method is the recurrence of the incomplete gamma function, Q(a + 1, y) = Q(a, y) + y^a e^-y / Γ(a +
    1), from Q(1/2, y) = erfc(√y) or Q(1, y) = e^-y on (Abramowitz and Stegun, 6.5.21).
    """
    if statistic <= 0:
        return 1.0
    half = statistic / 2
    order, chance = (0.5, math.erfc(math.sqrt(half))) if freedom % 2 else (1.0, math.exp(-half))
    while order < freedom / 2:
        chance += math.exp(order * math.log(half) - half - math.lgamma(order + 1))
        order += 1
    return chance
