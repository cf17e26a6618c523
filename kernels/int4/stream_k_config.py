"""The INT4 product on Hopper: which kernel serves how many rows of which weight, and how its work is cut.

    stream_k.py    all tiles' K in one row, every CTA an equal share
    mainloop.py  what it does with a share: words unpacked, multiplied, summed up
    epilogue.py      what it does with the sums of a tile that others have a part of
    tail_prefetch.py     the same where some CTAs have only tails of tiles, and the others' sums come early
    ptx.py       what these four say in PTX
    tile.py      what both kernels have in common on the host
    tma_loads.py    how both bring bytes into shared memory
    unpack.py    what both make of the bytes of `swap_ab.py`, where the reference is

Not for other chips. Tile and cut depend on the bucket of M and on the shape, so nothing compiles for a new M;
what chose them is measured, by `tests/bench/int4_tuning.py`. Batch-invariant serving has a kernel and rules of
its own, in `invariant.py` and `invariant_config.py`.
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import triton

from . import stream_k, tail_prefetch
from .stream_k import Tile
from .tile import NUM_SMS

LONG_K = 8192


@dataclass(frozen=True)
class Bucket:
    """How the products of up to 64 rows are cut.

    whole   one CTA for each tile of y, where they fill as much as `fill` of what the chip holds at once
    shared  elsewhere: shares, for about as many CTAs as the chip holds at once
    few     but one a multiprocessor where the shares of so many have no more units than this
    """

    data_parallel: Tile
    stream_k: Tile
    min_fill: float
    few_iters: int


BUCKETS = {
    8: Bucket(Tile(8, 64, 4, 4, 8, 80, 3), Tile(8, 64, 4, 4, 8, 80, 3), 0.6, 0),
    16: Bucket(Tile(16, 64, 4, 4, 8, 80, 3), Tile(16, 64, 4, 4, 8, 80, 3), 0.6, 0),
    32: Bucket(Tile(32, 64, 2, 5, 8, 80, 3), Tile(32, 64, 2, 5, 8, 80, 3), 0.6, 5),
    64: Bucket(Tile(64, 64, 2, 3, 4, 80, 3), Tile(64, 64, 2, 5, 8, 128, 2), 0.8, 10),
}
TILE_128X64 = Tile(128, 64, 2, 5, 1, 168, 1)
TILE_128X128 = Tile(128, 128, 2, 5, 1, 168, 1)
TILE_256X64 = Tile(256, 64, 2, 3, 1, 232, 1)
TILE_256X128 = Tile(256, 128, 1, 6, 4, 168, 1)
BUCKET_TILES = tuple(dict.fromkeys(tile for b in BUCKETS.values() for tile in (b.data_parallel, b.stream_k)))
TILES = (*BUCKET_TILES, TILE_128X64, TILE_128X128, TILE_256X64, TILE_256X128)
"""All that `plan` may choose."""

VERY_LONG_K = 16384
SPLIT_COST = 2.4 * 256
"""Columns of K whose products take as long as what cutting tiles costs: to start another, send, wait, add."""


@dataclass(frozen=True)
class Config:
    """A tile of `stream_k.py`, the number of CTAs, and what some of them begin later.

    head: units of K that the CTA of a tile has, where others have the tails (`tail_prefetch.py`); or 0
    """

    tile: Tile
    num_ctas: int
    start_offsets: tuple[int, ...] = (0,)
    head_iters: int = 0


@lru_cache(maxsize=4096)
def config_for(m: int, n: int, k: int) -> Config:
    """The tile and the cut for y [m, n] over k."""
    if m <= max(BUCKETS):
        return bucket_config(BUCKETS[next(rows for rows in BUCKETS if m <= rows)], m, n, k)
    return large_m_config(large_m_tile(m, n, k), m, n, k)


def large_m_tile(m: int, n: int, k: int) -> Tile:
    """The tile for more than 64 rows."""
    narrow_tiles = TILE_128X64.num_tiles(m, n)
    if m <= 128:
        return TILE_128X64 if narrow_tiles <= NUM_SMS and k <= VERY_LONG_K else TILE_128X128
    if 1.05 * TILE_128X128.m * triton.cdiv(m, TILE_128X128.m) < TILE_256X128.m * triton.cdiv(
        m, TILE_256X128.m
    ):
        return TILE_128X128  # half of the last tall tiles would be empty
    if TILE_256X128.num_tiles(m, n) >= (0.9 if m <= 512 else 0.6) * NUM_SMS or k > VERY_LONG_K:
        return TILE_256X128
    return TILE_128X64 if narrow_tiles <= NUM_SMS and k <= LONG_K else TILE_256X64


def bucket_config(bucket: Bucket, m: int, n: int, k: int) -> Config:
    tiles = bucket.data_parallel.num_tiles(m, n)
    slots = NUM_SMS * bucket.data_parallel.ctas_per_sm
    fill = bucket.min_fill if tiles <= slots else 0.9
    if tiles >= fill * triton.cdiv(tiles, slots) * slots:
        return Config(bucket.data_parallel, tiles)
    units = bucket.stream_k.num_tiles(m, n) * triton.cdiv(k, bucket.stream_k.unit)
    if units <= bucket.few_iters * NUM_SMS:
        return Config(bucket.stream_k, min(NUM_SMS, units))
    return stream_k_config(bucket.stream_k, m, n, k)


def large_m_config(tile: Tile, m: int, n: int, k: int) -> Config:
    """Whole tiles where they come out almost even, or where cutting them costs more than it gains."""
    tiles, slots = tile.num_tiles(m, n), NUM_SMS * tile.ctas_per_sm
    each = triton.cdiv(tiles, slots)
    if tiles % each == 0 and tiles // each >= 0.95 * slots:
        return Config(tile, tiles // each)
    with_tails = heads_and_tails(tiles, triton.cdiv(k, tile.unit)) if tile == TILE_256X64 else None
    if with_tails is not None:
        return with_tails
    split = stream_k_config(tile, m, n, k)
    return Config(tile, tiles) if each == 1 and k * (1 - tiles / split.num_ctas) <= SPLIT_COST else split


def heads_and_tails(tiles: int, iters_per_tile: int) -> Config | None:
    """A CTA for each of so many flat tiles, and one for the tails of every few that has them sent in time."""
    idle = NUM_SMS - tiles
    most = tail_prefetch.MAX_TAILS.value
    each = next((e for e in range(2, most + 1) if tiles % e == 0 and tiles // e <= idle), 0)
    if not each or tiles + tiles // each < 0.9 * NUM_SMS:
        return None
    unit = TILE_256X64.unit

    def last_and_first(head: int) -> tuple[int, int]:
        return max(head * unit, each * ((iters_per_tile - head) * unit + SEND_COST)), -head

    head = min(range(1, iters_per_tile), key=last_and_first, default=iters_per_tile)
    if (iters_per_tile - head) * unit <= TAIL_COST:
        return None
    return Config(TILE_256X64, tiles + tiles // each, head_iters=head)


def stream_k_config(tile: Tile, m: int, n: int, k: int) -> Config:
    """Config for about as many CTAs as the chip holds at once, but rather for so many that cut tiles alike.

    CTAs at the same columns of K find x in L2 together (`stream_k.py`). And where a tile has many parts,
    they are as equal as its units allow.
    """
    tiles, iters_per_tile = tile.num_tiles(m, n), triton.cdiv(k, tile.unit)
    slots = NUM_SMS * tile.ctas_per_sm
    parts = slots // tiles
    if parts >= 4:
        parts = triton.cdiv(iters_per_tile, triton.cdiv(iters_per_tile, parts))
        if parts * tiles >= 0.8 * slots:
            return Config(tile, parts * tiles)
    count = l2_aligned_ctas(tiles, slots, 4 * tile.ctas_per_sm) if tile.m >= 64 else slots
    if count > tiles * iters_per_tile:
        return Config(tile, tiles * iters_per_tile)
    again = math.gcd(count, tiles)
    turn = count // again
    if tile.m < stream_k.OFFSETS_FROM_ROWS.value or not 1 < turn <= 4 or tiles > 2 * count:
        return Config(tile, count)  # also where a cut is little of a share, and takes long to find
    return Config(tile, count, balanced_start_offsets(turn, tiles // again, iters_per_tile, tile.unit))


def l2_aligned_ctas(tiles: int, slots: int, places: int) -> int:
    """The largest number of CTAs whose shares begin at no more than so many places of K.

    At least nine tenths of `slots`, or all of them.
    """
    counts = (
        tiles * begins // ends
        for begins in range(1, places + 1)
        for ends in range(triton.cdiv(tiles * begins, slots), int(tiles * begins / (0.9 * slots)) + 1)
        if tiles * begins % ends == 0
    )
    return max(counts, default=slots)


SEND_COST, REDUCE_COST, STORE_COST = 320, 160, 200
"""Columns of K whose products take as long as sending a tile's sums, as adding another CTA's, and as writing
a tile to y."""
TAIL_COST = 270
"""Columns of K whose products take as long as what it costs a head to have a tail."""
MAX_SHIFT = 1.5 * SEND_COST
"""Columns by which it may pay to begin later or sooner."""


@lru_cache(maxsize=4096)
def balanced_start_offsets(turn: int, tiles: int, iters_per_tile: int, unit: int) -> tuple[int, ...]:
    """Where `turn` CTAs that share so many tiles begin, as `cuts`, so that the last of them ends soonest.

    And the first latest: of equal choices the most level one was fastest.
    """
    begins = [i * tiles * iters_per_tile // turn for i in range(turn + 1)]
    most = int(MAX_SHIFT // unit)
    choices = [
        [
            cut
            for cut in range(-most, most + 1)
            if begin % iters_per_tile and 0 < begin % iters_per_tile + cut < iters_per_tile
        ]
        or [0]
        for begin in begins[:-1]
    ]

    def last_and_first(cuts: tuple[int, ...]) -> tuple[float, float]:
        moved = [begin + cut for begin, cut in zip(begins, (*cuts, 0), strict=True)]
        if any(end <= begin for begin, end in itertools.pairwise(moved)):
            return math.inf, 0.0  # each that has a part of a tile is waited for
        ends = finish_times(moved, iters_per_tile, unit)
        return max(ends), -min(ends)

    return min(itertools.product(*choices), key=last_and_first)


def finish_times(begins: list[int], iters_per_tile: int, unit: int) -> list[float]:
    """When each of some CTAs is done, in columns of K: CTA i, here the last first, has units begins[i] on."""
    sent: dict[int, list[float]] = {}
    ends = []
    for first, end in reversed(list(itertools.pairwise(begins))):
        time = 0.0
        while first < end:
            tile, piece = divmod(first, iters_per_tile)
            length = min(end - first, iters_per_tile - piece)
            first += length
            time += length * unit
            if piece:
                time += SEND_COST
                sent.setdefault(tile, []).append(time)
                continue
            if length < iters_per_tile:
                time = max([time, *sent[tile]]) + REDUCE_COST * len(sent[tile])
            if first < end:
                time += STORE_COST
        ends.append(time)
    return ends
