"""The INT4 product on Hopper: which kernel serves how many rows of which weight, and how its work is cut.

    shares.py    all tiles' K in one row, every CTA an equal share
    products.py  what it does with a share: words unpacked, multiplied, summed up
    sums.py      what it does with the sums of a tile that others have a part of
    tails.py     the same where some CTAs have only tails of tiles, and the others' sums come early
    ptx.py       what these four say in PTX
    tile.py      what both kernels have in common on the host
    copies.py    how both bring bytes into shared memory
    unpack.py    what both make of the bytes of `swap_ab.py`, where the reference is

Not for other chips. Tile and cut depend on the bucket of M and on the shape, so nothing compiles for a new M;
what chose them is measured, by `tests/bench/int4_cuts.py`. Batch-invariant serving has a kernel and rules of
its own, in `invariant.py` and `invariant_plan.py`.
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from . import invariant_plan, shares, tails
from .shares import Tile
from .tile import MULTIPROCESSORS

MOST_ROWS = 16384
LONG_K = 8192


@dataclass(frozen=True)
class Bucket:
    """How the products of up to 64 rows are cut.

    whole   one CTA for each tile of y, where they fill as much as `fill` of what the chip holds at once
    shared  elsewhere: shares, for about as many CTAs as the chip holds at once
    few     but one a multiprocessor where the shares of so many have no more units than this
    """

    whole: Tile
    shared: Tile
    fill: float
    few: int


BUCKETS = {
    8: Bucket(Tile(8, 64, 4, 4, 8, 80, 3), Tile(8, 64, 4, 4, 8, 80, 3), 0.6, 0),
    16: Bucket(Tile(16, 64, 4, 4, 8, 80, 3), Tile(16, 64, 4, 4, 8, 80, 3), 0.6, 0),
    32: Bucket(Tile(32, 64, 2, 5, 8, 80, 3), Tile(32, 64, 2, 5, 8, 80, 3), 0.6, 5),
    64: Bucket(Tile(64, 64, 2, 3, 4, 80, 3), Tile(64, 64, 2, 5, 8, 128, 2), 0.8, 10),
}
ALONE = Tile(128, 64, 2, 5, 1, 168, 1)
WIDE = Tile(128, 128, 2, 5, 1, 168, 1)
FLAT = Tile(256, 64, 2, 3, 1, 232, 1)
TALL = Tile(256, 128, 1, 6, 4, 168, 1)
OF_BUCKETS = tuple(dict.fromkeys(tile for b in BUCKETS.values() for tile in (b.whole, b.shared)))
TILES = (*OF_BUCKETS, ALONE, WIDE, FLAT, TALL)
"""All that `plan` may choose."""

VERY_LONG_K = 16384
CUT = 2.4 * 256
"""Columns of K whose products take as long as what cutting tiles costs: to start another, send, wait, add."""


@dataclass(frozen=True)
class Shares:
    """A tile of `shares.py`, the number of CTAs, and what some of them begin later.

    head: units of K that the CTA of a tile has, where others have the tails (`tails.py`); or 0
    """

    tile: Tile
    count: int
    cuts: tuple[int, ...] = (0,)
    head: int = 0


@lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int) -> Shares:
    """The tile and the cut for y [m, n] over k."""
    if m <= max(BUCKETS):
        return of_bucket(BUCKETS[next(rows for rows in BUCKETS if m <= rows)], m, n, k)
    return whole_or_shared(tile_of(m, n, k), m, n, k)


def tile_of(m: int, n: int, k: int) -> Tile:
    """The tile for more than 64 rows."""
    narrow_tiles = ALONE.number(m, n)
    if m <= 128:
        return ALONE if narrow_tiles <= MULTIPROCESSORS and k <= VERY_LONG_K else WIDE
    if 1.05 * WIDE.m * triton.cdiv(m, WIDE.m) < TALL.m * triton.cdiv(m, TALL.m):
        return WIDE  # half of the last tall tiles would be empty
    if TALL.number(m, n) >= (0.9 if m <= 512 else 0.6) * MULTIPROCESSORS or k > VERY_LONG_K:
        return TALL
    return ALONE if narrow_tiles <= MULTIPROCESSORS and k <= LONG_K else FLAT


def of_bucket(bucket: Bucket, m: int, n: int, k: int) -> Shares:
    tiles = bucket.whole.number(m, n)
    slots = MULTIPROCESSORS * bucket.whole.resident
    fill = bucket.fill if tiles <= slots else 0.9
    if tiles >= fill * triton.cdiv(tiles, slots) * slots:
        return Shares(bucket.whole, tiles)
    units = bucket.shared.number(m, n) * triton.cdiv(k, bucket.shared.unit)
    if units <= bucket.few * MULTIPROCESSORS:
        return Shares(bucket.shared, min(MULTIPROCESSORS, units))
    return shared(bucket.shared, m, n, k)


def whole_or_shared(tile: Tile, m: int, n: int, k: int) -> Shares:
    """Whole tiles where they come out almost even, or where cutting them costs more than it gains."""
    tiles, slots = tile.number(m, n), MULTIPROCESSORS * tile.resident
    each = triton.cdiv(tiles, slots)
    if tiles % each == 0 and tiles // each >= 0.95 * slots:
        return Shares(tile, tiles // each)
    with_tails = heads_and_tails(tiles, triton.cdiv(k, tile.unit)) if tile == FLAT else None
    if with_tails is not None:
        return with_tails
    cut = shared(tile, m, n, k)
    return Shares(tile, tiles) if each == 1 and k * (1 - tiles / cut.count) <= CUT else cut


def heads_and_tails(tiles: int, units_k: int) -> Shares | None:
    """A CTA for each of so many flat tiles, and one for the tails of every few that has them sent in time."""
    idle = MULTIPROCESSORS - tiles
    most = tails.MOST_TAILS.value
    each = next((e for e in range(2, most + 1) if tiles % e == 0 and tiles // e <= idle), 0)
    if not each or tiles + tiles // each < 0.9 * MULTIPROCESSORS:
        return None
    unit = FLAT.unit

    def last_and_first(head: int) -> tuple[int, int]:
        return max(head * unit, each * ((units_k - head) * unit + SEND)), -head

    head = min(range(1, units_k), key=last_and_first, default=units_k)
    if (units_k - head) * unit <= JOIN:
        return None
    return Shares(FLAT, tiles + tiles // each, head=head)


def shared(tile: Tile, m: int, n: int, k: int) -> Shares:
    """Shares for about as many CTAs as the chip holds at once, but rather for so many that cut tiles alike.

    CTAs at the same columns of K find x in L2 together (`shares.py`). And where a tile has many parts,
    they are as equal as its units allow.
    """
    tiles, units_k = tile.number(m, n), triton.cdiv(k, tile.unit)
    slots = MULTIPROCESSORS * tile.resident
    parts = slots // tiles
    if parts >= 4:
        parts = triton.cdiv(units_k, triton.cdiv(units_k, parts))
        if parts * tiles >= 0.8 * slots:
            return Shares(tile, parts * tiles)
    count = in_step(tiles, slots, 4 * tile.resident) if tile.m >= 64 else slots
    if count > tiles * units_k:
        return Shares(tile, tiles * units_k)
    again = math.gcd(count, tiles)
    turn = count // again
    if tile.m < shares.FEWEST_CUT.value or not 1 < turn <= 4 or tiles > 2 * count:
        return Shares(tile, count)  # also where a cut is little of a share, and takes long to find
    return Shares(tile, count, balanced(turn, tiles // again, units_k, tile.unit))


def in_step(tiles: int, slots: int, places: int) -> int:
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


SEND, ADD, WRITE = 320, 160, 200
"""Columns of K whose products take as long as sending a tile's sums, as adding another CTA's, and as writing
a tile to y."""
JOIN = 270
"""Columns of K whose products take as long as what it costs a head to have a tail."""
MOST = 1.5 * SEND
"""Columns by which it may pay to begin later or sooner."""


@lru_cache(maxsize=4096)
def balanced(turn: int, tiles: int, units_k: int, unit: int) -> tuple[int, ...]:
    """Where `turn` CTAs that share so many tiles begin, as `cuts`, so that the last of them ends soonest.

    And the first latest: of equal choices the most level one was fastest.
    """
    begins = [i * tiles * units_k // turn for i in range(turn + 1)]
    most = int(MOST // unit)
    choices = [
        [cut for cut in range(-most, most + 1) if begin % units_k and 0 < begin % units_k + cut < units_k]
        or [0]
        for begin in begins[:-1]
    ]

    def last_and_first(cuts: tuple[int, ...]) -> tuple[float, float]:
        moved = [begin + cut for begin, cut in zip(begins, (*cuts, 0), strict=True)]
        if any(end <= begin for begin, end in itertools.pairwise(moved)):
            return math.inf, 0.0  # each that has a part of a tile is waited for
        ends = ends_of(moved, units_k, unit)
        return max(ends), -min(ends)

    return min(itertools.product(*choices), key=last_and_first)


def ends_of(begins: list[int], units_k: int, unit: int) -> list[float]:
    """When each of some CTAs is done, in columns of K: CTA i, here the last first, has units begins[i] on."""
    sent: dict[int, list[float]] = {}
    ends = []
    for first, end in reversed(list(itertools.pairwise(begins))):
        time = 0.0
        while first < end:
            tile, piece = divmod(first, units_k)
            length = min(end - first, units_k - piece)
            first += length
            time += length * unit
            if piece:
                time += SEND
                sent.setdefault(tile, []).append(time)
                continue
            if length < units_k:
                time = max([time, *sent[tile]]) + ADD * len(sent[tile])
            if first < end:
                time += WRITE
        ends.append(time)
    return ends


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
    operands = words, meta, arrivals
    if batch_invariant:
        invariant_plan.matmul(x, *operands, y, group_size, fractional)
        return y
    for first in range(0, m, MOST_ROWS):
        some = slice(first, first + MOST_ROWS)
        chosen = plan(len(x[some]), n, k)
        shares.launch(
            x[some],
            *operands,
            y[some],
            group_size,
            fractional,
            chosen.tile,
            chosen.count,
            chosen.cuts,
            chosen.head,
        )
    return y
