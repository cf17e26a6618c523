"""How far from float64 a right result may be on any CPU, relative and of norms: from formats and K alone.

Rounding errors have random signs, so they add up as the root of the sum of their squares. One rounding moves
a number by at most u, the unit roundoff of its format, and numbers of all sizes by 0.42 u (root mean square).
Of a sum of K products of random signs, what stands after k of them is of size sqrt(k): to add them one after
another, the worst order, moves it by sqrt(K / 6) u = 0.41 sqrt(K) u. Both bounds are 2.4 times that.
"""

import math

import torch

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def rounded(dtype: torch.dtype, times: int = 1) -> float:
    """Of numbers that are rounded to `dtype` as often as that on their way to the result."""
    return math.sqrt(times) * UNIT_ROUNDOFF[dtype]


def summed(k: int) -> float:
    """Of sums of `k` products of random signs, accumulated in float32 in any order."""
    return math.sqrt(k) * UNIT_ROUNDOFF[torch.float32]


def product_bound(dtype: torch.dtype, k: int) -> float:
    """Of a layout's product: weights and y are rounded to the activations' dtype, and sums are float32's.

    In float32 a weight is rounded four times: its scale, its zero, their products and the sum of these.
    """
    return rounded(dtype, times=4 if dtype == torch.float32 else 2) + summed(k)


CASTING_BOUND = rounded(torch.bfloat16, times=3)
"""Of the layout that rounds activations of other types to bfloat16 as well."""
