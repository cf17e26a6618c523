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


def summed_in_e4m3() -> float:
    """Of sums that Hopper adds up in E4M3 over 128 columns each, before they are added to others in float32.

    wgmma adds 32 products and the sum before them after it has cut each off at 2^-13 of the power of two of
    the largest. Such an error is 1/sqrt(3) of a step on average, and there are 33 in each of 128 columns'
    four. The largest is at most 16 times the mean size of products of normal numbers with normal numbers or
    evenly drawn codes: a product of five times that is one in millions, and the sum of 128 is 11 to 18 times
    that. The sum's error beside the sum itself, at least sqrt(128) times that mean:
    """
    return math.sqrt(4 * 33 / 3) * 2.0**-13 * 16 / math.sqrt(128)


CASTING_BOUND = rounded(torch.bfloat16, times=3)
"""Of the layout that rounds activations of other types to bfloat16 as well."""
