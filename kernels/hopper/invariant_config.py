"""Bucket table and split-K heuristics of the batch-invariant kernel: which tile, how many splits of K.

The tile depends on the number of rows of x, by bucket, and not on the shape, so nothing compiles for a new M.
The number of splits depends on the shape of the weight alone, so that a row's bits do not depend on other
rows. Costs were measured on one H200 (`tests/bench/results/kernels/int4_kernel_log.md`).
"""

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ..triton_imports import triton
from . import invariant
from .invariant import SPLIT_UNIT, Tile
from .packed_operand import SEMAPHORES, PackedOperand
from .tile import NUM_SMS

# Tile: m, n, k_tiles, stages, slices, registers, ctas_per_sm, unit_us
BUCKETS = {
    8: (Tile(8, 64, 2, 8, 8, 80, 3, 1.1),),
    16: (Tile(16, 64, 2, 8, 8, 80, 3, 1.2),),
    32: (Tile(32, 64, 2, 8, 8, 128, 2, 1.0), Tile(32, 64, 2, 6, 8, 80, 3, 1.5)),
    64: (Tile(64, 64, 2, 5, 8, 128, 2, 1.27), Tile(64, 64, 2, 3, 8, 80, 3, 1.9)),
    128: (Tile(128, 64, 2, 5, 8, 168, 1, 0.92, reduce_cost=5.0),),
    256: (
        Tile(256, 64, 1, 6, 4, 168, 1, 1.4, reduce_cost=5.0),
        Tile(256, 128, 1, 6, 2, 168, 1, 2.4, reduce_cost=9.0),
    ),
}
LONG_K = 8192
TWO_PER_SM = Tile(128, 64, 1, 5, 4, 128, 2, 1.1)
SEQUENTIAL_TILES = (BUCKETS[64][0], BUCKETS[128][0], TWO_PER_SM)
"""Where one CTA sums all splits of K: up to 64 rows; few tiles; many."""
MAX_SPLITS = 16


@dataclass(frozen=True)
class Split:
    """The first `whole` tiles of y are computed by one CTA each; the others are split along K in `splits`."""

    whole: int
    splits: int
    cost: float
    """The cost in units of `SPLIT_UNIT` columns of K, computed one after the other."""


def split_of(tiles: int, units: int, slots: int, reduce_cost: float = 0.0) -> Split:
    """Plan whole waves of CTAs, then split the remaining tiles so that they fill one more wave as well as
    possible.

    A split costs one and a half units to start and two fifths of a unit to be reduced.
    """
    waves = tiles // slots
    rest = tiles - waves * slots
    if rest == 0:
        return Split(tiles, 1, waves * (units + 1.5))

    def cost(splits: int) -> float:
        reducing = splits * 0.4 + reduce_cost if splits > 1 else 0.0
        return -(-rest * splits // slots) * (-(-units // splits) + 1.5) + reducing

    splits = min(range(1, min(MAX_SPLITS, units) + 1), key=cost)
    return Split(tiles if splits == 1 else tiles - rest, splits, waves * (units + 1.5) + cost(splits))


@lru_cache(maxsize=4096)
def tile_and_split(m: int, n: int, k: int) -> tuple[Tile, Split]:
    """Return the tile of the bucket that is expected to finish first for y [m, n] over k, and its split."""
    bucket = next((rows for rows in BUCKETS if m <= rows), max(BUCKETS))
    units = triton.cdiv(k, SPLIT_UNIT)

    def split(tile: Tile) -> Split:
        return split_of(tile.num_tiles(m, n), units, NUM_SMS * tile.ctas_per_sm, tile.reduce_cost)

    tile = min(BUCKETS[bucket], key=lambda tile: tile.unit_us * split(tile).cost)
    return tile, split(tile)


@lru_cache(maxsize=4096)
def splits_of(n: int, k: int) -> int:
    """Return the splits of K, from the weight's shape alone: few if K is long, as suits 64 and 128 rows."""
    tile = BUCKETS[8][0]
    slots = NUM_SMS * (2 if k > LONG_K else tile.ctas_per_sm)
    split = split_of(tile.num_tiles(1, n), triton.cdiv(k, SPLIT_UNIT), slots)
    return 1 if split.whole else split.splits


@lru_cache(maxsize=4096)
def tile_for(m: int, n: int, k: int) -> tuple[Tile, bool]:
    """Return a tile, and whether one CTA sums all splits of K, one after the other, or each has its own."""
    splits, units = splits_of(n, k), triton.cdiv(k, SPLIT_UNIT)
    if m <= 32 or (m <= 128 and (k > LONG_K or splits == 1)):
        tiles = BUCKETS[next(rows for rows in BUCKETS if m <= rows)]
        if m > 64 and splits > 1:
            tiles = (*tiles, TWO_PER_SM)

        def cost(tile: Tile) -> float:
            waves = triton.cdiv(tile.num_tiles(m, n) * splits, NUM_SMS * tile.ctas_per_sm)
            return tile.unit_us * waves * (triton.cdiv(units, splits) + 1.5)

        return min(tiles, key=cost), False
    if splits == 1:
        return tile_and_split(m, n, k)[0], False
    small, few, many = SEQUENTIAL_TILES
    if m <= small.m:
        return small, True
    return (few if few.num_tiles(m, n) <= NUM_SMS else many), True


def matmul(x: Tensor, weight: PackedOperand, y: Tensor) -> None:
    """Write x [M, K] @ w.T into y [M, N], as `gemm.matmul` does but for the order of summation."""
    m, n = y.shape
    if m == 0:
        return
    tile, sequential = tile_for(m, n, weight.columns)
    splits = splits_of(n, weight.columns)
    rows = m if sequential else max(1, SEMAPHORES // triton.cdiv(n, tile.n)) * tile.m
    for first in range(0, m, rows):
        some = slice(first, first + rows)
        invariant.launch(x[some], weight, y[some], tile, splits, sequential)
