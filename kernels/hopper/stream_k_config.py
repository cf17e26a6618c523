"""Bucket table and split heuristics of the stream-K kernel: which tile, how many CTAs, for M, N and K.

Everything depends on the bucket of M and on N and K, so nothing compiles for a new M. Tiles, costs and
thresholds were chosen by timing every candidate on one H200 in November 2026
(`tests/bench/kernels/int4_tuning.py`, `tests/bench/results/kernels/int4_kernel_log.md`). Costs are in columns
of K: the time of the wgmmas for that many columns. Batch-invariant serving uses `invariant_config.py`.
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from ..triton_imports import WHOLE_VIEWS, triton
from . import stream_k, tail_prefetch
from .stream_k import Config, Tile
from .tile import NUM_SMS


@dataclass(frozen=True)
class Bucket:
    """Parameters that say how the products of up to 64 rows are split.

    data_parallel  a CTA for each tile of y, where they fill as much as `min_fill` of the chip's CTA slots
    stream_k       elsewhere: stream-K on about as many CTAs as there are slots
    few_iters      but on one CTA an SM where these have no more iterations than this each
    """

    data_parallel: Tile
    stream_k: Tile
    min_fill: float
    few_iters: int


# Tile: m, n, k_tiles, stages, slices, registers, ctas_per_sm
BUCKETS = {
    8: Bucket(Tile(8, 64, 4, 4, 8, 80, 3), Tile(8, 64, 4, 4, 8, 80, 3), 0.6, 0),
    16: Bucket(Tile(16, 64, 4, 4, 8, 80, 3), Tile(16, 64, 4, 4, 8, 80, 3), 0.6, 0),
    32: Bucket(Tile(32, 64, 2, 5, 8, 80, 3), Tile(32, 64, 2, 5, 8, 80, 3), 0.6, 5),
    64: Bucket(Tile(64, 64, 2, 3, 4, 80, 3), Tile(64, 64, 2, 5, 8, 128, 2), 0.8, 10),
}
"""The buckets, by the largest number of rows of x in each."""
TILE_128X64 = Tile(128, 64, 2, 5, 1, 168, 1)
TILE_128X128 = Tile(128, 128, 2, 5, 1, 168, 1)
TILE_256X64 = Tile(256, 64, 1, 6, 4, 232, 1) if WHOLE_VIEWS else Tile(256, 64, 2, 3, 1, 232, 1)
"""Where all memory has to be a multiple of a stage's x, its stages are smaller."""
TILE_256X128 = Tile(256, 128, 1, 6, 4, 168, 1)
BUCKET_TILES = tuple(dict.fromkeys(tile for b in BUCKETS.values() for tile in (b.data_parallel, b.stream_k)))
TILES = (*BUCKET_TILES, TILE_128X64, TILE_128X128, TILE_256X64, TILE_256X128)
"""All tiles that `config_for` may choose."""

LONG_K = 8192
VERY_LONG_K = 16384
SPLIT_COST = 2.4 * 256
"""The fixed cost of splitting tiles: to start another tile, send, wait and reduce."""
SEND_COST, REDUCE_COST, STORE_COST = 320, 160, 200
"""Sending a tile's partial sums, reducing another CTA's, storing a tile of y."""
TAIL_COST = 270
"""The cost that a tail adds to its head."""
MAX_SHIFT = 1.5 * SEND_COST
"""The largest shift of a start offset, earlier or later, that may pay."""


@lru_cache(maxsize=4096)
def config_for(m: int, n: int, k: int) -> Config:
    """Return the tile and the split for y [m, n] over k."""
    if m <= max(BUCKETS):
        return bucket_config(BUCKETS[next(rows for rows in BUCKETS if m <= rows)], m, n, k)
    return large_m_config(large_m_tile(m, n, k), m, n, k)


def bucket_config(bucket: Bucket, m: int, n: int, k: int) -> Config:
    """Return the tile and the split for up to 64 rows."""
    tiles = bucket.data_parallel.num_tiles(m, n)
    slots = NUM_SMS * bucket.data_parallel.ctas_per_sm
    fill = bucket.min_fill if tiles <= slots else 0.9
    if tiles >= fill * triton.cdiv(tiles, slots) * slots:
        return Config(bucket.data_parallel, tiles)
    total_iters = bucket.stream_k.num_tiles(m, n) * triton.cdiv(k, bucket.stream_k.iter_columns)
    if total_iters <= bucket.few_iters * NUM_SMS:
        return Config(bucket.stream_k, min(NUM_SMS, total_iters))
    return split_config(bucket.stream_k, m, n, k)


def large_m_tile(m: int, n: int, k: int) -> Tile:
    """Return the tile for more than 64 rows."""
    small_tiles = TILE_128X64.num_tiles(m, n)
    if m <= 128:
        return TILE_128X64 if small_tiles <= NUM_SMS and k <= VERY_LONG_K else TILE_128X128
    rows_of_128, rows_of_256 = (tile.m * triton.cdiv(m, tile.m) for tile in (TILE_128X128, TILE_256X128))
    if 1.05 * rows_of_128 < rows_of_256:
        return TILE_128X128  # half of the last tiles of 256 rows would be empty
    if TILE_256X128.num_tiles(m, n) >= (0.9 if m <= 512 else 0.6) * NUM_SMS or k > VERY_LONG_K:
        return TILE_256X128
    return TILE_128X64 if small_tiles <= NUM_SMS and k <= LONG_K else TILE_256X64


def large_m_config(tile: Tile, m: int, n: int, k: int) -> Config:
    """Use data-parallel CTAs if tiles spread almost evenly, or if splitting costs more than it gains."""
    tiles, slots = tile.num_tiles(m, n), NUM_SMS * tile.ctas_per_sm
    tiles_per_cta = triton.cdiv(tiles, slots)
    if tiles % tiles_per_cta == 0 and tiles // tiles_per_cta >= 0.95 * slots:
        return Config(tile, tiles // tiles_per_cta)
    with_tails = head_tail_config(tiles, triton.cdiv(k, tile.iter_columns)) if tile == TILE_256X64 else None
    if with_tails is not None:
        return with_tails
    split = split_config(tile, m, n, k)
    keep = tiles_per_cta == 1 and k * (1 - tiles / split.num_ctas) <= SPLIT_COST
    return Config(tile, tiles) if keep else split


def head_tail_config(tiles: int, iters_per_tile: int) -> Config | None:
    """Use one CTA for the head of each 256x64 tile, and one CTA for the tails of as many tiles as it can
    finish in time.
    """
    idle = NUM_SMS - tiles
    most = tail_prefetch.MAX_TAILS.value
    each = next((e for e in range(2, most + 1) if tiles % e == 0 and tiles // e <= idle), 0)
    if not each or tiles + tiles // each < 0.9 * NUM_SMS:
        return None
    columns = TILE_256X64.iter_columns

    def finish_time_and_first(head: int) -> tuple[int, int]:
        return max(head * columns, each * ((iters_per_tile - head) * columns + SEND_COST)), -head

    head = min(range(1, iters_per_tile), key=finish_time_and_first, default=iters_per_tile)
    if (iters_per_tile - head) * columns <= TAIL_COST:
        return None
    return Config(TILE_256X64, tiles + tiles // each, head_iters=head)


def split_config(tile: Tile, m: int, n: int, k: int) -> Config:
    """Use stream-K on about as many CTAs as there are slots, preferably on a number that splits tiles alike.

    CTAs at the same columns of K find x in L2 together (`stream_k.py`). If a tile has many parts, they are as
    equal as its iterations allow.
    """
    tiles, iters_per_tile = tile.num_tiles(m, n), triton.cdiv(k, tile.iter_columns)
    slots = NUM_SMS * tile.ctas_per_sm
    parts = slots // tiles
    if parts >= 4:
        share = triton.cdiv(iters_per_tile, parts)
        parts = triton.cdiv(iters_per_tile, share)
        # On fewer CTAs it takes no longer where some would have as much to do on all of them.
        if parts * tiles >= 0.8 * slots or share <= triton.cdiv(tiles * iters_per_tile, slots):
            return Config(tile, parts * tiles)
    num_ctas = l2_aligned_ctas(tiles, slots, 4 * tile.ctas_per_sm) if tile.m >= 64 else slots
    if num_ctas > tiles * iters_per_tile:
        return Config(tile, tiles * iters_per_tile)
    periods = math.gcd(num_ctas, tiles)
    period = num_ctas // periods
    if tile.m < stream_k.OFFSETS_ROWS.value or not 1 < period <= 4 or tiles > 2 * num_ctas:
        return Config(tile, num_ctas)  # also where an offset is little of a share, and takes long to find
    offsets = balanced_start_offsets(period, tiles // periods, iters_per_tile, tile.iter_columns)
    return Config(tile, num_ctas, offsets)


def l2_aligned_ctas(tiles: int, slots: int, places: int) -> int:
    """Return the largest number of CTAs whose shares start at no more than `places` different places along K.

    The number is at least nine tenths of `slots`, or all of them.
    """
    counts = (
        tiles * starts // ends
        for starts in range(1, places + 1)
        for ends in range(triton.cdiv(tiles * starts, slots), int(tiles * starts / (0.9 * slots)) + 1)
        if tiles * starts % ends == 0
    )
    return max(counts, default=slots)


@lru_cache(maxsize=4096)
def balanced_start_offsets(
    period: int, tiles: int, iters_per_tile: int, iter_columns: int
) -> tuple[int, ...]:
    """Return start offsets of `period` CTAs that share this many tiles, so that the last CTA finishes as
    early as possible.

    Among equal choices, the first CTA finishes as late as possible: the most even choice was fastest.
    """
    starts = [i * tiles * iters_per_tile // period for i in range(period + 1)]
    most = int(MAX_SHIFT // iter_columns)
    choices = [
        [
            offset
            for offset in range(-most, most + 1)
            if start % iters_per_tile and 0 < start % iters_per_tile + offset < iters_per_tile
        ]
        or [0]
        for start in starts[:-1]
    ]

    def last_and_first(offsets: tuple[int, ...]) -> tuple[float, float]:
        moved = [start + offset for start, offset in zip(starts, (*offsets, 0), strict=True)]
        if any(end <= start for start, end in itertools.pairwise(moved)):
            return math.inf, 0.0  # each that has a part of a tile is waited for
        times = finish_times(moved, iters_per_tile, iter_columns)
        return max(times), -min(times)

    return min(itertools.product(*choices), key=last_and_first)


def finish_times(starts: list[int], iters_per_tile: int, iter_columns: int) -> list[float]:
    """Return when each CTA finishes, the last CTA first; CTA i begins at iteration starts[i]."""
    sent: dict[int, list[float]] = {}
    times = []
    for first, end in reversed(list(itertools.pairwise(starts))):
        time = 0.0
        while first < end:
            tile, begin = divmod(first, iters_per_tile)
            length = min(end - first, iters_per_tile - begin)
            first += length
            time += length * iter_columns
            if begin:
                time += SEND_COST
                sent.setdefault(tile, []).append(time)
                continue
            if length < iters_per_tile:
                time = max([time, *sent[tile]]) + REDUCE_COST * len(sent[tile])
            if first < end:
                time += STORE_COST
        times.append(time)
    return times
