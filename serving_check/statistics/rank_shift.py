"""How far one sample lies above another, by ranks alone: no distribution is assumed, and a few disturbed
values move it little (Hodges and Lehmann, 1963).

The module is pure arithmetic; the caller decides.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import median


def shift(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of all differences between a value of `above` and one of `below`."""
    return median(_differences(above, below))


def least_shift(above: Sequence[float], below: Sequence[float], error: float) -> float:
    """Return the lower confidence limit of that shift, at a one-sided level of at most `error`.

    The limit uses the Mann-Whitney test's exact distribution, and so needs values without ties; it is -inf if
    there are too few values.
    """
    differences = _differences(above, below)
    total = math.comb(len(above) + len(below), len(above))
    rank, tail = 0, 0
    while rank < len(differences):
        tail += _arrangements(len(above), len(below), rank)
        if tail > error * total:
            break
        rank += 1
    return differences[rank - 1] if rank else -math.inf


def _differences(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return sorted(high - low for high in above for low in below)


@cache
def _arrangements(ours: int, theirs: int, wins: int) -> int:
    """Return the number of orders of `ours` and `theirs` values in which ours are above theirs in `wins`
    pairs.
    """
    if wins < 0:
        return 0
    if not ours or not theirs:
        return int(wins == 0)
    # The largest value of all is ours, and wins against all of theirs, or it is theirs.
    return _arrangements(ours - 1, theirs, wins - theirs) + _arrangements(ours, theirs - 1, wins)
