"""How strongly a series' neighbours resemble each other, at most, and how much wider that makes the limits of
its mean.

The model is a first-order autoregression: each value takes over the share `rho` of its predecessor's
deviation. A few values tell little of rho and tell it too low, because the mean that deviations are taken
from is their own. So the estimate is inverted through what the same number of values would show on average
under each rho (the idea of Andrews, 1993), and an upper limit is used rather than the estimate. A random walk
then ends at `LARGEST`, where nothing can be decided.

Where what is to be known is where the walk set out, its limits are finite (`random_walk`).
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

LARGEST = 0.98
"""The strongest correlation that is told from a random walk."""
STEPS = 49
"""Correlations are rounded up to a step of `LARGEST / STEPS`."""
CAUTION = 1.5
"""Standard errors above the estimate that the upper limit lies. Chosen with the operating characteristic: the
least that keeps a random walk from deciding."""


WALK_FREEDOM = 2
"""Degrees of freedom of a random walk: 5 (count² - 1) / (2 count² + 7) exactly, 1.9 of four, 2.5 of many."""


@dataclass(frozen=True)
class VarianceInflation:
    """How much wider correlation makes the limits of a mean than independent values would."""

    cost: float
    """By how much the variance of the mean exceeds what the values' own variance makes it look."""
    freedom: float
    """Degrees of freedom that the values' own variance has (Satterthwaite, 1946)."""


@dataclass(frozen=True)
class Autoregression(VarianceInflation):
    """What `count` values of a first-order autoregression show of themselves on average.

    Exact, from the covariance matrix R (R_ij = rho^|i-j|) and the centring matrix C = I - 11'/count.
    """

    lag_one: float
    """Expected sum of products of neighbouring deviations over the expected sum of their squares."""


def upper_correlation(series: Sequence[Sequence[float]]) -> float:
    """The upper limit of rho, 0 to LARGEST, from all series together, each [values] in the order of time."""
    told = [values for values in series if len(values) > 1]
    total = sum(len(values) for values in told)
    if not told:
        return LARGEST
    shown = sum(len(values) * _lag_one(values) for values in told) / total + CAUTION / math.sqrt(total)
    lengths = Counter(len(values) for values in told)
    low, high = 0, STEPS
    while low < high:
        middle = (low + high) // 2
        expected = sum(
            number * count * autoregression(count, _rho(middle)).lag_one for count, number in lengths.items()
        )
        if expected / total < shown:
            low = middle + 1
        else:
            high = middle
    return _rho(low)


@lru_cache(maxsize=4096)
def autoregression(count: int, rho: float) -> Autoregression:
    """`count` is at least 2, rho from 0 to below 1."""
    powers = [rho**lag for lag in range(count)]
    sums = [0.0]
    for power in powers:
        sums.append(sums[-1] + power)
    rows = [sums[row + 1] + sums[count - row] - 1 for row in range(count)]
    everything = math.fsum(rows)
    squares = count - everything / count
    neighbours = (count - 1) * (rho + everything / count**2) - (2 * everything - rows[0] - rows[-1]) / count
    trace = count + 2 * math.fsum((count - lag) * powers[lag] ** 2 for lag in range(1, count))
    spread = trace - 2 / count * math.fsum(row * row for row in rows) + (everything / count) ** 2
    return Autoregression(
        lag_one=neighbours / squares,
        cost=everything / count * (count - 1) / squares,
        freedom=squares**2 / spread,
    )


def random_walk(count: int) -> VarianceInflation:
    """Of a random walk of `count` values, at least 2, whose first one is what their mean is to tell.

    Exact, from the covariance matrix R_ij = min(i, j), counted from 0. A walk is still near where it set out,
    so its cost is finite, where an autoregression's grows with rho without end.
    """
    return VarianceInflation(cost=(count - 1) * (2 * count - 1) / (count + 1), freedom=WALK_FREEDOM)


def _lag_one(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    deviations = [value - mean for value in values]
    squares = math.fsum(deviation * deviation for deviation in deviations)
    products = math.fsum(earlier * later for earlier, later in itertools.pairwise(deviations))
    return products / squares if squares > 0 else 0.0


def _rho(step: int) -> float:
    return LARGEST * step / STEPS
