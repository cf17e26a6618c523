"""INT4 products of many rows of x on Hopper: who takes which rows of the weight.

    int4_waves.py       as many as fill whole waves of the chip, or all of them
    int4_dequantize.py  the rest, dequantized for cuBLAS, or all of them
    int4_hopper.py      for the last rows of x, where they would leave half a tile empty, all of them

Nothing compiles for a new M. Not for batch-invariant serving. The constants below were fitted to 190 products
of 640 to 8192 rows on an H200, with 5% of error; what is chosen by them takes 1% more than the best of each.
"""

from functools import lru_cache

import torch
import triton
from torch import Tensor

from . import int4_dequantize, int4_hopper, int4_waves

FEW = 512
"""Rows of x up to which `int4_hopper.py` alone is best."""
TILE = int4_waves.BUCKETS[256][-1]
UNIT_US = 3.05
"""256 columns of K, where every multiprocessor has a tile."""
NEVER_LESS = 0.2
"""Of that, what is left where few have one."""
PART_US = 1.5
"""To add up a part of K."""
FEW_LEFT = (64, 128)
"""Rows of x that half a tile holds."""
START_US, BYTES_US, OPERATIONS_US = 2.0, 3.6e6, 730e6
"""Of the rest: to start two kernels; to dequantize; for cuBLAS."""


@lru_cache(maxsize=4096)
def cut_rows(m: int, n: int, k: int) -> tuple[slice, ...]:
    """The rows of x that are best multiplied together: all, or a few that are left over by themselves.

    Those are 64 or 128, some of them for the second time, so that no kernel is met first for their number.
    """
    left = m % TILE.m
    few = next((rows for rows in FEW_LEFT if left <= rows), 0)
    together = slice(0, m)
    if left == 0 or few == 0 or m < TILE.m:
        return (together,)
    apart = best(m - left, n, k)[0] + few_us(few, n, k)
    return (slice(0, m - left), slice(m - few, m)) if apart < best(m, n, k)[0] else (together,)


@lru_cache(maxsize=4096)
def fused_blocks(m: int, n: int, k: int) -> int:
    """Blocks of TILE.n rows of the weight, the first ones, that the fused kernel takes."""
    return best(m, n, k)[1]


def best(m: int, n: int, k: int) -> tuple[float, int]:
    """The least microseconds, and the blocks with which the fused kernel then is."""
    tiles_m, blocks = triton.cdiv(m, TILE.m), triton.cdiv(n, TILE.n)
    waves = tiles_m * blocks // int4_waves.MULTIPROCESSORS
    in_waves = waves * int4_waves.MULTIPROCESSORS // tiles_m

    def microseconds(taken: int) -> float:
        return fused_us(tiles_m * taken, k) + rest_us(m, n - taken * TILE.n, k)

    taken = min((blocks, in_waves, 0), key=microseconds)
    return microseconds(taken), taken


def few_us(m: int, n: int, k: int) -> float:
    """A few rows of x alone, by `int4_hopper.py`."""
    return 5.0 + n * k * (0.25e-6 if m == FEW_LEFT[0] else 0.4e-6)


def fused_us(tiles: int, k: int) -> float:
    """Whole waves, and then the tiles that do not fill one, their K split."""
    slots, units = int4_waves.MULTIPROCESSORS, triton.cdiv(k, int4_waves.UNIT)
    waves, left = divmod(tiles, slots)
    whole = waves * (units + 1.5) * UNIT_US
    if left == 0:
        return whole
    parts = int4_waves.split_of(tiles, units, slots, TILE.combine).parts
    turns = triton.cdiv(left * parts, slots)
    filled = NEVER_LESS + (1 - NEVER_LESS) * left * parts / (turns * slots)
    adding = parts * PART_US if parts > 1 else 0.0
    return whole + turns * (triton.cdiv(units, parts) + 1.5) * filled * UNIT_US + adding


def rest_us(m: int, rows: int, k: int) -> float:
    """Dequantizing so many rows of the weight, and cuBLAS on them."""
    if rows <= 0:
        return 0.0
    return START_US + rows * k * (2.53 / BYTES_US + 2 * m / OPERATIONS_US)


def matmul(
    x: Tensor, words: Tensor, meta: Tensor, arrivals: Tensor, n: int, group_size: int, fractional: bool
) -> Tensor:
    """y [M, N] = x [M, K] @ w.T, as `int4_hopper.matmul`."""
    m, k = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    for rows in cut_rows(m, n, k):
        count = rows.stop - rows.start
        blocks = fused_blocks(count, n, k) if count > FEW else triton.cdiv(n, TILE.n)
        multiply(x[rows], words, meta, arrivals, y[rows], group_size, fractional, blocks)
    return y


def multiply(
    x: Tensor,
    words: Tensor,
    meta: Tensor,
    arrivals: Tensor,
    y: Tensor,
    group_size: int,
    fractional: bool,
    blocks: int,
) -> None:
    """The product into `y`, of the weight's first `blocks` by the fused kernel, of the others by cuBLAS."""
    first = blocks * TILE.n
    if first >= y.shape[1]:
        int4_hopper.multiply(x, words, meta, arrivals, y, group_size, fractional)
        return
    if blocks:
        # The first tiles in one go each, and no parts of the others.
        tiles = blocks * triton.cdiv(len(x), TILE.m)
        int4_waves.launch(x, words, meta, arrivals, y, group_size, fractional, TILE, tiles, 0)
    int4_dequantize.matmul(x, words, meta, y, first, group_size, fractional)
