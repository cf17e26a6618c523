"""Matrix product in E4M3 with few rows of x on Hopper: the entry, and which tile and split.

    x         [M, K]   float8_e4m3fn, rows contiguous       x_scale  fp32 [M]
    weight    [N, K]   float8_e4m3fn, rows contiguous       w_scale  fp32 [1, N]
    y         [M, N]   bf16 or fp16

The kernel is `hopper/stream_k.py` with the weight of `rows.py`: TMA loads rows as they are stored, so the
bytes also serve torch's product, which is faster with many rows. Sums of 128 columns, for which Hopper has 14
bits, are added to earlier sums in fp32.

Tile and split depend on the bucket of M and on N and K, so nothing compiles for a new M. They were chosen by
timing on an H200 (`tests/bench/results/kernels/fp8_h100.txt`). The product is not batch-invariant, since M
decides how K is split.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..device import compute_capability
from ..hopper import stream_k
from ..hopper.packed_operand import PackedOperand
from ..hopper.stream_k import Config, Tile
from ..hopper.stream_k_config import split_config
from ..hopper.tile import NUM_SMS
from ..triton_imports import triton
from .rows import E4M3Rows

HOPPER = (9, 0)
# Tile: m, n, k_tiles, stages, slices, registers, ctas_per_sm
TILES = {
    8: Tile(8, 64, 4, 5, 8, 128, 2),
    16: Tile(16, 64, 4, 4, 8, 128, 2),
    32: Tile(32, 64, 2, 8, 8, 128, 2),
    64: Tile(64, 64, 4, 3, 8, 128, 2),
    128: Tile(64, 64, 2, 6, 8, 128, 2),
    256: Tile(128, 64, 2, 4, 8, 128, 2),
}
"""By the largest number of rows of x in each bucket."""
WIDE_TILES = {8: Tile(8, 64, 4, 3, 8, 80, 3), 16: Tile(16, 64, 2, 6, 8, 80, 3)}
"""The same where a CTA a tile almost fills the GPU."""
WIDE, NARROW = 2 * NUM_SMS, NUM_SMS // 2
"""Tiles of 64 rows of a weight. With more than WIDE of them `matmul.py` is faster from 17 rows of x on; with
more than NARROW, torch's product from 129 rows on."""
PART_COST, PART_COST_OF_64 = 1000, 1500
"""Columns of K that take as long as each part that a tile is split into: to send, wait and reduce. The second
is for tiles of 64 rows of x."""


def serves(m: int, n: int, k: int, device: torch.device) -> bool:
    """Say whether the product takes m rows and a weight [n, k]: TMA loads rows of a multiple of 16 bytes."""
    return 0 < m <= most_rows(n) and n % 4 == 0 and k % 16 == 0 and compute_capability(device) == HOPPER


def most_rows(n: int) -> int:
    """Return the number of rows of x up to which this product is the fastest for a weight of n rows."""
    tiles = triton.cdiv(n, 64)
    return max(WIDE_TILES) if tiles > WIDE else 128 if tiles > NARROW else max(TILES)


@lru_cache(maxsize=4096)
def config_for(m: int, n: int, k: int) -> Config:
    """Return the tile and the split for y [m, n] over k. A tile is split into equal parts, if into any."""
    bucket = next(rows for rows in TILES if m <= rows)
    tile = TILES[bucket]
    wide = WIDE_TILES.get(bucket, tile)
    tiles, slots = wide.num_tiles(m, n), NUM_SMS * wide.ctas_per_sm
    if bucket in WIDE_TILES and tiles >= 0.9 * triton.cdiv(tiles, slots) * slots:
        return Config(wide, tiles)
    tiles, slots = tile.num_tiles(m, n), NUM_SMS * tile.ctas_per_sm
    parts = min(slots // tiles, triton.cdiv(k, tile.iter_columns))
    if parts == 0:
        return split_config(tile, m, n, k)
    cost = parts * (PART_COST_OF_64 if tile.m == 64 else PART_COST)
    return Config(tile, tiles * parts if k * (1 - 1 / parts) > cost else tiles)


def words_of(w_scale: Tensor) -> Tensor:
    """Return scales fp32 [1, N] as int32, with the strides of a row: a transposed column has other ones."""
    return w_scale.view(-1).view(torch.int32).view(1, -1)


def matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    semaphores: Tensor,
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """Return a new y [M, N] of `dtype`; x and the weight are aligned to 16 bytes.

    semaphores: int32 zeros, SEMAPHORES of them, for this weight alone
    config: overrides the table, for tuning
    """
    y = torch.empty((len(x), len(weight)), dtype=dtype, device=x.device)
    decoder = E4M3Rows(dtype == torch.float16)
    operand = PackedOperand(weight, words_of(w_scale), semaphores, decoder, factor=x_scale)
    stream_k.launch(x, operand, y, config or config_for(*y.shape, x.shape[1]))
    return y
