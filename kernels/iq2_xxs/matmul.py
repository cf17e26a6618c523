"""Chooses the kernel and the tile for an IQ2_XXS weight, by M, N and K; host side.

One row of x has its own kernel; more rows use the stream-K kernel that all formats share. The file
`tests/bench/results/kernels/iq2_xxs_log.md` tells how the tiles were chosen.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..hopper import stream_k
from ..hopper.packed_operand import PackedOperand
from ..hopper.stream_k import Config, Tile
from ..hopper.stream_k_config import Bucket, bucket_config, large_m_config
from ..hopper.tile import NUM_SMS
from . import one_row

# Tile: m, n, k_tiles, stages, slices, registers, ctas_per_sm
TILE_8 = Tile(8, 128, 4, 3, 8, 80, 2)
TILE_16 = Tile(16, 64, 4, 3, 8, 80, 3)
TILE_32 = Tile(32, 64, 2, 3, 8, 80, 3)
TILE_64 = Tile(64, 64, 2, 4, 8, 128, 2)
TILE_128 = Tile(128, 128, 2, 5, 1, 168, 1)
BUCKETS = {tile.m: Bucket(tile, tile, 0.9, 0) for tile in (TILE_8, TILE_16, TILE_32, TILE_64)}
TILES = (TILE_8, TILE_16, TILE_32, TILE_64, TILE_128)
"""The codebook takes 32 KB of a CTA's shared memory, so rings are shorter than for other formats."""

ONE_ROW = {2 * NUM_SMS * 16: one_row.Tile(1, 1, 8, 2), 6 * NUM_SMS * 16: one_row.Tile(1, 1, 8, 3)}
"""By the rows of the weight, at most: a strip for each CTA; up to two."""
ONE_ROW_OF_MANY = one_row.Tile(1, 4, 4, 1)


def one_row_tile(n: int) -> one_row.Tile:
    return next((tile for most, tile in ONE_ROW.items() if n <= most), ONE_ROW_OF_MANY)


@lru_cache(maxsize=4096)
def config_for(m: int, n: int, k: int) -> Config:
    """Return the tile and the split for y [m, n] over k; m is at most the number of rows of TILE_128."""
    if m <= max(BUCKETS):
        return bucket_config(BUCKETS[next(rows for rows in BUCKETS if m <= rows)], m, n, k)
    return large_m_config(TILE_128, m, n, k)


def matmul(x: Tensor, operand: PackedOperand, n: int) -> Tensor:
    """Return y [M, n] = x [M, K] @ w.T; x has the decoder's dtype, bf16 or fp16, and is contiguous and
    aligned to 16 bytes.
    """
    m, k = x.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 1:
        one_row.launch(x, operand, y, one_row_tile(n))
        return y
    for first in range(0, m, TILE_128.m):
        rows = slice(first, first + TILE_128.m)
        stream_k.launch(x[rows], operand, y[rows], config_for(len(x[rows]), n, k))
    return y
