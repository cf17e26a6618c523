"""INT4 products of many rows of x on Hopper: who takes which rows of the weight.

    int4_waves.py       as many as fill whole waves of the chip, or all of them
    int4_dequantize.py  the rest, dequantized for cuBLAS, or all of them

Nothing compiles for a new M. Not for batch-invariant serving.
"""

import torch
import triton
from torch import Tensor

from . import int4_dequantize, int4_hopper, int4_waves

FEW = 512
"""Rows of x up to which `int4_hopper.py` alone is best."""
TILE = int4_waves.BUCKETS[256][-1]
MIN_ROWS, MIN_ROWS_OF_LONG_K = 4096, 8192
"""Rows of x from which on dequantizing all was faster on an H200; K is long above LONG_K."""
LONG_K = 8192


def fused_blocks(m: int, n: int, k: int) -> int:
    """Blocks of TILE.n rows of the weight, the first ones, that the fused kernel takes."""
    many = m >= (MIN_ROWS if k <= LONG_K else MIN_ROWS_OF_LONG_K)
    return 0 if many else triton.cdiv(n, TILE.n)


def matmul(
    x: Tensor,
    words: Tensor,
    meta: Tensor,
    arrivals: Tensor,
    n: int,
    group_size: int,
    fractional: bool,
    blocks: int | None = None,
) -> Tensor:
    """y [M, N] = x [M, K] @ w.T, as `int4_hopper.matmul`; `blocks` None is the rule's."""
    m, k = x.shape
    if blocks is None:
        blocks = fused_blocks(m, n, k)
    first = blocks * TILE.n
    if first >= n:
        return int4_hopper.matmul(x, words, meta, arrivals, n, group_size, fractional)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if blocks:
        # The first tiles in one go each, and no parts of the others.
        tiles = blocks * triton.cdiv(m, TILE.m)
        int4_waves.launch(x, words, meta, arrivals, y, group_size, fractional, TILE, tiles, 0)
    int4_dequantize.matmul(x, words, meta, y, first, group_size, fractional)
    return y
