"""The INT4 product on Hopper: which kernel serves how many rows of which weight, and how its work is cut.

    int4_shares.py   up to 512 rows: all tiles' K in one row, every CTA an equal share
    int4_waves.py    more rows, and where it was faster: whole waves of tiles, then the K of the rest split
    int4_sums.py     what the first does with the sums of a tile that others have a part of
    int4_copies.py   how both bring bytes into shared memory
    int4_unpack.py   what both make of the bytes of `int4_swap_ab.py`, where the reference is

`int4_many_rows.py` calls these for more than 512 rows, and cuBLAS beside them.

Not for other chips. Kernel and tile depend on the bucket of M and on the shape, so nothing compiles for a new
M; what chose them is measured, by `tests/bench/int4_cuts.py`. In batch-invariant serving the order of
summation depends on the shape of the weight alone, and `int4_waves.py` serves every M.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import int4_shares, int4_waves
from .int4_shares import Tile
from .int4_waves import MULTIPROCESSORS, UNIT, Split

ARRIVALS = 1024
"""Counters of the parts of tiles that are done; zero, and left so."""
LONG_K = 8192
TWO_A_MULTIPROCESSOR = int4_waves.Tile(128, 64, 1, 5, 4, 128, 2, 1.1)
ORDERED_TILES = (int4_waves.BUCKETS[64][0], int4_waves.BUCKETS[128][0], TWO_A_MULTIPROCESSOR)
"""Where one CTA sums all parts of K of batch-invariant products: up to 64 rows; few tiles; many."""


@dataclass(frozen=True)
class Bucket:
    """How the products of so many rows are cut.

    whole   one CTA for each tile of y, where they fill as much as `fill` of what the chip holds at once
    shared  elsewhere: equal shares, for all CTAs that the chip holds at once
    few     but one a multiprocessor where the shares of so many have no more units than this
    """

    whole: Tile
    shared: Tile
    fill: float
    few: int


BUCKETS = {
    8: Bucket(Tile(8, 64, 4, 4, 8, 80, 3), Tile(8, 64, 4, 4, 8, 80, 3), 0.6, 0),
    16: Bucket(Tile(16, 64, 4, 4, 8, 80, 3), Tile(16, 64, 4, 4, 8, 80, 3), 0.6, 0),
    32: Bucket(Tile(32, 64, 2, 5, 8, 80, 3), Tile(32, 64, 2, 8, 8, 128, 2), 0.6, 10),
    64: Bucket(Tile(64, 64, 2, 3, 4, 80, 3), Tile(64, 64, 2, 5, 8, 128, 2), 0.8, 10),
}
WIDE = Tile(128, 128, 2, 5, 8, 168, 1)
NARROW = Tile(128, 64, 1, 5, 4, 128, 2)
ALONE = Tile(128, 64, 2, 5, 8, 168, 1)
TALL = Tile(256, 128, 1, 6, 4, 168, 1)
OF_BUCKETS = tuple(dict.fromkeys(tile for b in BUCKETS.values() for tile in (b.whole, b.shared)))
TILES = (*OF_BUCKETS, WIDE, NARROW, ALONE, TALL)
"""All that `plan` may choose."""


@dataclass(frozen=True)
class Shares:
    """A tile of `int4_shares.py` and the number of CTAs."""

    tile: Tile
    count: int


@dataclass(frozen=True)
class Waves:
    """A tile of `int4_waves.py` and the split of what does not fill a wave."""

    tile: int4_waves.Tile
    split: Split


def plan(m: int, n: int, k: int) -> Shares | Waves:
    """The kernel, the tile and the cut for y [m, n] over k."""
    if m <= max(BUCKETS):
        return cut(BUCKETS[next(rows for rows in BUCKETS if m <= rows)], m, n, k)
    waves = Waves(*int4_waves.plan(m, n, k))
    narrow_tiles = triton.cdiv(m, 128) * triton.cdiv(n, 64)
    units = narrow_tiles * triton.cdiv(k, UNIT)
    if m <= 128:
        if narrow_tiles > MULTIPROCESSORS or k > 16384:
            return shared(WIDE, m, n, k, MULTIPROCESSORS)
        if narrow_tiles >= 0.7 * MULTIPROCESSORS:
            return waves
        if units > 15 * MULTIPROCESSORS:
            return shared(NARROW, m, n, k, 2 * MULTIPROCESSORS)
        alone = shared(ALONE, m, n, k, MULTIPROCESSORS)
        return alone if alone.count % narrow_tiles == 0 else shared(NARROW, m, n, k, MULTIPROCESSORS)
    if m > 512:
        return waves
    tall_tiles = triton.cdiv(m, TALL.m) * triton.cdiv(n, TALL.n)
    if tall_tiles >= 0.95 * MULTIPROCESSORS or k > 16384:
        return whole_or_shared(TALL, m, n, k)
    if m <= 256 and narrow_tiles <= MULTIPROCESSORS:
        if k > 8192:
            return shared(WIDE, m, n, k, MULTIPROCESSORS)
        if narrow_tiles >= 0.8 * MULTIPROCESSORS:
            return Shares(ALONE, narrow_tiles)
        return shared(NARROW, m, n, k, MULTIPROCESSORS)
    filled = triton.cdiv(m, 256) * triton.cdiv(n, 64) / MULTIPROCESSORS
    evenly = filled >= (0.7 if filled <= 1 else 0.9 * math.ceil(filled))
    return waves if evenly else shared(WIDE, m, n, k, MULTIPROCESSORS)


def cut(bucket: Bucket, m: int, n: int, k: int) -> Shares:
    tiles = triton.cdiv(m, bucket.whole.m) * triton.cdiv(n, bucket.whole.n)
    slots = MULTIPROCESSORS * bucket.whole.resident
    fill = bucket.fill if tiles <= slots else 0.9
    if tiles >= fill * triton.cdiv(tiles, slots) * slots:
        return Shares(bucket.whole, tiles)
    tiles = triton.cdiv(m, bucket.shared.m) * triton.cdiv(n, bucket.shared.n)
    units = tiles * triton.cdiv(k, UNIT)
    if units <= bucket.few * MULTIPROCESSORS:
        return Shares(bucket.shared, min(MULTIPROCESSORS, units))
    return shared(bucket.shared, m, n, k, MULTIPROCESSORS * bucket.shared.resident)


def whole_or_shared(tile: Tile, m: int, n: int, k: int) -> Shares:
    """One CTA a multiprocessor: whole tiles where they come out almost even, equal shares elsewhere."""
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    each = triton.cdiv(tiles, MULTIPROCESSORS)
    if tiles % each == 0 and tiles // each >= 0.95 * MULTIPROCESSORS:
        return Shares(tile, tiles // each)
    return shared(tile, m, n, k, MULTIPROCESSORS)


def shared(tile: Tile, m: int, n: int, k: int, count: int) -> Shares:
    """Equal shares for `count` CTAs, or for fewer where there are fewer units.

    Where a few CTAs less cut every tile into the same parts, and x is not small, they walk along K together
    and find it in L2: down of Llama-3-70B at M=64 takes 64 us with 256 and 71 with 264.
    """
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    count = min(count, tiles * triton.cdiv(k, UNIT))
    alike = count // tiles * tiles
    return Shares(tile, alike if tile.m >= 64 and alike >= 0.95 * count else count)


def invariant_parts(n: int, k: int) -> int:
    """Parts of K by the shape of the weight alone: the one order of summation of batch-invariant serving."""
    split = int4_waves.plan(1, n, k)[1]
    return 1 if split.whole else split.parts


def invariant_tile(m: int, n: int, k: int) -> tuple[int4_waves.Tile, bool]:
    """A tile, and whether one CTA sums all parts of K, one after the other; elsewhere each has its own."""
    if m <= 32 or (m <= 64 and k > LONG_K) or invariant_parts(n, k) == 1:
        return int4_waves.plan(m, n, k)[0], False
    small, alone, many = ORDERED_TILES
    if m <= small.m:
        return small, True
    tiles = triton.cdiv(m, alone.m) * triton.cdiv(n, alone.n)
    return (alone if tiles <= MULTIPROCESSORS else many), True


def matmul(
    x: Tensor,
    words: Tensor,
    meta: Tensor,
    arrivals: Tensor,
    n: int,
    group_size: int,
    fractional: bool,
    batch_invariant: bool = False,
) -> Tensor:
    """y [M, N] = x [M, K] @ w.T; x bf16 or fp16, contiguous, on 16 bytes; `arrivals` zero, and left so."""
    m, k = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    operands = words, meta, arrivals
    if batch_invariant:
        tile, ordered = invariant_tile(m, n, k)
        parts = invariant_parts(n, k)
        rows = m if ordered else max(1, ARRIVALS // triton.cdiv(n, tile.n)) * tile.m
        for first in range(0, m, rows):
            some = slice(first, first + rows)
            int4_waves.launch(x[some], *operands, y[some], group_size, fractional, tile, 0, parts, ordered)
        return y
    multiply(x, *operands, y, group_size, fractional)
    return y


def multiply(
    x: Tensor, words: Tensor, meta: Tensor, arrivals: Tensor, y: Tensor, group_size: int, fractional: bool
) -> None:
    """The product into `y`, tuned: as `plan` says."""
    m, n = y.shape
    chosen = plan(m, n, x.shape[1])
    operands = words, meta, arrivals, y, group_size, fractional
    if isinstance(chosen, Shares):
        int4_shares.launch(x, *operands, chosen.tile, chosen.count)
    else:
        int4_waves.launch(x, *operands, chosen.tile, chosen.split.whole, chosen.split.parts)
