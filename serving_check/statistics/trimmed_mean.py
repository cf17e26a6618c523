"""A series' trimmed mean and its confidence limits, as wide as the correlation between neighbours makes them.

The module is pure arithmetic, with Student's t; `decide.py` decides by the limits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from .correlation import VarianceInflation, autoregression, random_walk

VALUES_PER_TRIM = 8
"""One value is trimmed from each end for every this many."""


def interval(
    values: Sequence[float],
    low_error: float,
    high_error: float,
    correlation: float = 0.0,
    at_most_a_walk: bool = False,
) -> tuple[float, float]:
    """Return confidence limits for the centre of `values`, one-sided levels each; infinite below two values.

    correlation: an upper limit for the correlation between neighbours
    at_most_a_walk: whether the values are at worst a random walk that starts at the first of them
    """
    if len(values) < 2:
        return -math.inf, math.inf
    found = trimmed(values)
    inflations: list[VarianceInflation] = [autoregression(len(values), correlation)]
    if at_most_a_walk:
        inflations.append(random_walk(len(values)))
    low, high = (
        min(_half_width(found, inflation, error) for inflation in inflations)
        for error in (low_error, high_error)
    )
    return found.centre - low, found.centre + high


@dataclass(frozen=True)
class TrimmedMean:
    centre: float
    """The trimmed mean."""
    standard_error: float
    """The standard error of the trimmed mean, from the winsorized values as if they were independent."""
    freedom: int


def trimmed(values: Sequence[float]) -> TrimmedMean:
    trim = len(values) // VALUES_PER_TRIM
    kept = sorted(values)[trim : len(values) - trim]
    if len(kept) < 2:
        return TrimmedMean(fmean(kept), math.inf, 1)
    moved = winsorized(values)
    mean = fmean(moved)
    squares = math.fsum((value - mean) ** 2 for value in moved)
    return TrimmedMean(fmean(kept), math.sqrt(squares / (len(kept) * (len(kept) - 1))), len(kept) - 1)


def winsorized(values: Sequence[float]) -> list[float]:
    """Return the values in their order, with the extremes replaced by the outermost value that is not
    trimmed.
    """
    trim = len(values) // VALUES_PER_TRIM
    ordered = sorted(values)
    return [min(max(value, ordered[trim]), ordered[-1 - trim]) for value in values]


def _half_width(found: TrimmedMean, inflation: VarianceInflation, error: float) -> float:
    freedom = max(1, min(found.freedom, math.floor(inflation.freedom + 1e-9)))
    return student_t_quantile(error, freedom) * found.standard_error * math.sqrt(inflation.cost)


@lru_cache
def student_t_quantile(upper_tail: float, freedom: int) -> float:
    """Return the t that a Student variable exceeds with probability `upper_tail`, which is below one half."""
    low, high = 0.0, 1.0
    while _student_t_tail(high, freedom) > upper_tail:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if _student_t_tail(middle, freedom) > upper_tail:
            low = middle
        else:
            high = middle
    return high


def _student_t_tail(t: float, freedom: int) -> float:
    """Return P(T > t) for whole degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine_squared = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(2 + odd, freedom, 2):
        term *= cosine_squared * (step - 1) / step
        total += term
    central = math.sin(angle) * total
    if odd:
        central = 2 / math.pi * (angle + central)
    return (1 - central) / 2
