"""Matrix product of FP8 activations and INT4 weights on Hopper (W4A8): the entry, and which tile and split.

    x         [M, K]   float8_e4m3fn, rows contiguous       x_scale   fp32 [M]
    words, scale_words                                      as in `e4m3_packing.py`
    y         [M, N]   bf16 or fp16

The kernel is `hopper/stream_k.py` with the decoder of `e4m3_decoder.py`: sums over a group in E4M3's 14 bits,
times the group's scale, are added up in fp32, and multiplied by the row's scale at the end.

Tile and split depend on the bucket of M and on N and K, so nothing compiles for a new M. Tiles and splits
were chosen by timing on an H100 (`tests/bench/results/kernels/int4_fp8_h100.txt`). The product is not
batch-invariant, since M decides how K is split.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..hopper import stream_k
from ..hopper.gemm import MAX_ROWS
from ..hopper.packed_operand import PackedOperand
from ..hopper.stream_k import Config, Tile
from ..hopper.stream_k_config import LONG_K, Bucket, bucket_config, split_config
from ..hopper.tile import NUM_SMS
from ..triton_imports import triton
from .e4m3_decoder import Int4E4M3Decoder

# Tile: m, n, k_tiles, stages, slices, registers, ctas_per_sm
BUCKETS = {
    8: Bucket(Tile(8, 64, 2, 8, 8, 80, 3), Tile(8, 64, 4, 4, 8, 128, 2), 0.6, 0),
    16: Bucket(Tile(16, 64, 2, 8, 8, 80, 3), Tile(16, 64, 4, 4, 8, 128, 2), 0.6, 0),
    32: Bucket(Tile(32, 64, 2, 5, 8, 80, 3), Tile(32, 64, 2, 6, 8, 128, 2), 0.6, 0),
}
"""By the largest number of rows of x in each."""
TILE_64X64 = Tile(64, 64, 4, 3, 8, 128, 2)
TILE_64X64_THREE_AN_SM = Tile(64, 64, 2, 5, 8, 80, 3)
"""If a CTA a tile almost fills the GPU three times."""
TILE_128X64 = Tile(128, 64, 2, 4, 8, 128, 2)
TILE_256X128 = Tile(256, 128, 2, 5, 8, 168, 1)
BUCKET_TILES = tuple(dict.fromkeys(tile for b in BUCKETS.values() for tile in (b.data_parallel, b.stream_k)))
TILES = (*BUCKET_TILES, TILE_64X64, TILE_64X64_THREE_AN_SM, TILE_128X64, TILE_256X128)
"""All tiles that `config_for` may choose, with chunks of 128 columns."""
SPLIT_COST = 4096
"""Columns of K that take as long as splitting tiles of 64 or 128 rows of x: to send, wait and reduce."""


def for_groups(tile: Tile, group_size: int) -> Tile:
    """Return the tile with chunks of a group of 32, 64 or 128 columns; the group's scale multiplies a chunk's
    sums.
    """
    return replace(tile, slices=group_size // 16)


@lru_cache(maxsize=4096)
def config_for(m: int, n: int, k: int, group_size: int) -> Config:
    """Return the tile and the split for y [m, n] over k, in groups of 32, 64 or 128."""
    if m <= max(BUCKETS):
        bucket = BUCKETS[next(rows for rows in BUCKETS if m <= rows)]
        whole, split = (for_groups(tile, group_size) for tile in (bucket.data_parallel, bucket.stream_k))
        return bucket_config(replace(bucket, data_parallel=whole, stream_k=split), m, n, k)
    three = for_groups(TILE_64X64_THREE_AN_SM, group_size)
    slots = NUM_SMS * three.ctas_per_sm
    if m <= three.m and 0.9 * slots <= three.num_tiles(m, n) <= slots:
        return Config(three, three.num_tiles(m, n))
    largest = for_groups(TILE_256X128, group_size)
    count = largest.num_tiles(m, n)
    if m > 128 and count >= 0.9 * NUM_SMS:
        return Config(largest, min(count, NUM_SMS))
    rows = 64 if m <= 64 else triton.cdiv(m, 128) * 128
    all_at_once = TILE_64X64.num_tiles(rows, n) <= NUM_SMS * TILE_64X64.ctas_per_sm
    small = m <= 64 or (all_at_once and (m <= 128 or k <= LONG_K))
    tile = for_groups(TILE_64X64 if small else TILE_128X64, group_size)
    count, config = tile.num_tiles(m, n), split_config(tile, m, n, k)
    one_each = count <= NUM_SMS * tile.ctas_per_sm
    return Config(tile, count) if one_each and k * (1 - count / config.num_ctas) <= SPLIT_COST else config


def matmul(
    x: Tensor,
    x_scale: Tensor,
    words: Tensor,
    scale_words: Tensor,
    semaphores: Tensor,
    n: int,
    group_size: int,
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """Return a new y [M, n] of `dtype`; x is aligned to 16 bytes.

    semaphores: int32 zeros, SEMAPHORES of them, for this weight alone
    config: overrides the table, for tuning
    """
    y = torch.empty((len(x), n), dtype=dtype, device=x.device)
    decoder = Int4E4M3Decoder(dtype == torch.float16, group_size)
    for first in range(0, len(x), MAX_ROWS):
        rows = slice(first, first + MAX_ROWS)
        weight = PackedOperand(words, scale_words, semaphores, decoder, factor=x_scale[rows])
        chosen = config or config_for(len(x[rows]), n, weight.columns, group_size)
        stream_k.launch(x[rows], weight, y[rows], chosen)
    return y
