"""An upper limit for the correlation of neighbours in a series, and how much it widens the mean's limits.

The model is a first-order autoregression: each value inherits the share `rho` of its predecessor's deviation.
Few values estimate rho poorly and too low, because deviations are taken from their own mean. The estimate is
therefore inverted through the average estimate of the same number of values under each rho (after Andrews,
1993), and an upper limit replaces it. For a random walk this limit then reaches `LARGEST`, at which nothing
can be decided.

If the mean only has to tell where a random walk started, its limits are finite (`random_walk`).
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

LARGEST = 0.98
"""The strongest correlation that can be distinguished from a random walk."""
STEPS = 49
"""Correlations are rounded up to a step of `LARGEST / STEPS`."""
CAUTION = 1.5
"""By how many standard errors the upper limit is above the estimate. The operating characteristic shows that
this is the least number with which a random walk decides nothing."""


WALK_FREEDOM = 2
"""Degrees of freedom of a random walk: 5 (count² - 1) / (2 count² + 7) exactly, 1.9 of four, 2.5 of many."""


@dataclass(frozen=True)
class VarianceInflation:
    """How much wider correlation makes the limits of a mean than independent values would."""

    cost: float
    """The variance of the mean, over the variance that independent values would suggest."""
    freedom: float
    """Degrees of freedom of the values' own variance (Satterthwaite, 1946)."""


@dataclass(frozen=True)
class Autoregression(VarianceInflation):
    """The averages that `count` values of a first-order autoregression show.

    The averages are exact, from the covariance matrix R (R_ij = rho^|i-j|) and the centring matrix C = I -
    11'/count.
    """

    lag_one: float
    """Expected sum of products of neighbouring deviations over the expected sum of their squares."""
    of_mean: float
    """The variance of the mean, over the variance of a value divided by their count."""

    @property
    def of_variance(self) -> float:
        """Return the true variance of a value, divided by the variance that the values of such a series are
        expected to show.
        """
        return self.cost / self.of_mean


def upper_correlation(series: Sequence[Sequence[float]], caution: float = CAUTION) -> float:
    """Return the upper limit of rho, 0 to LARGEST, from all series together, each [values] in the order of
    time.

    caution: by how many standard errors the limit is above the estimate
    """
    told = [values for values in series if len(values) > 1]
    total = sum(len(values) for values in told)
    if not told:
        return LARGEST
    shown = sum(len(values) * _lag_one(values) for values in told) / total + caution / math.sqrt(total)
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
    """Return the averages for `count` values, at least 2, and a correlation rho from 0 to below 1."""
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
        of_mean=everything / count,
        cost=everything / count * (count - 1) / squares,
        freedom=squares**2 / spread,
    )


def random_walk(count: int) -> VarianceInflation:
    """Return the inflation for a random walk of `count` values, at least 2, whose mean estimates its first
    value.

    The inflation is exact, from the covariance matrix R_ij = min(i, j), counted from 0. A walk stays near its
    start, so its cost is finite, while an autoregression's grows with rho without limit.
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
