"""Draws Ms between the given Ms, so that a server cannot pass by being fast at the given Ms only.

Kernels and CUDA graphs are chosen in buckets of M that end at powers of two, if not closer. A power of two
fills its bucket exactly, so a kernel that is slow for all other Ms would show at no power of two.
"""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

STEP = 2
"""The largest ratio of an M to the one before it, among given and drawn Ms together. Then every bucket from
one power of two to the next contains an M."""


def draw_between(ms: Sequence[int], seed: int) -> tuple[int, ...]:
    """Draw at least one M in every gap between neighbours of `ms` that contains a whole number, and as many
    as `STEP` needs; return them ascending. The same seed gives the same Ms, on any machine.
    """
    generator = random.Random(f"Ms between {seed}")
    return tuple(m for low, high in pairwise(sorted(ms)) for m in _in_gap(low, high, generator))


def _in_gap(low: int, high: int, generator: random.Random) -> list[int]:
    """Return one M for each factor of `STEP` from `low` to `high`, and at least one: one fewer might be
    enough, but would leave only the powers of two to draw between 1 and 8."""
    count = min(max(1, math.floor(math.log(high / low, STEP) + 1e-9)), high - low - 1)
    drawn = [low]
    for later in reversed(range(count)):
        # So large that those still to come can reach `high`, and so small that there is room for them.
        least = max(drawn[-1] + 1, math.ceil(high / STEP ** (later + 1)))
        most = min(STEP * drawn[-1], high - later - 1)
        drawn.append(generator.randint(least, most))
    return drawn[1:]
