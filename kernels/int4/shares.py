"""INT4 product on Hopper, in Gluon: all tiles' K in one row, every CTA an equal share of it.

For any number of rows of x. Not for batch-invariant serving (`invariant.py`): where a tile is cut
depends on how many there are.

Shapes: x [M, K], packed weight [N, K] in tiles of 64 rows and 64 columns (`swap_ab.py`), y [M, N].

The tiles of y are numbered down M, then along N, and each has as many units of work as K has 128 or 256
columns; CTA i of C takes the units from about i * total / C on, so that it may end one tile, do others whole
and begin one more:

    CTA 0 |-- tile 0 --|- tile 1           the CTA with a tile's first unit owns it: it adds the others'
    CTA 1               -|-- tile 2 --|-   sums to its own, in order of K, so the bits are the same
    CTA 2                    tile 3 ---|   every time

To send sums, to wait for others' and to add these takes as long as 200 to 400 columns of K, so where the same
cuts come again every two, three or four CTAs, those who send get less to multiply (`cuts`, of
`hopper.py`).

An owner waits for CTAs with higher numbers, which the grid starts first (it counts backwards), so it never
waits for one that has yet to find room. With as many CTAs as tiles each does one, and nobody waits.

Some numbers of tiles are cut otherwise, a head and a tail each: `tails.py`.

All CTAs read x, and where many of them are at the same columns at the same time, L2 sends these to several at
once. So a number of CTAs that cuts few tiles alike is worth more than one that keeps every multiprocessor
busy: 80 tiles of 256 rows by 120 CTAs, two tiles for three of them, take 40 us, by 132 CTAs 51.

    producer warp   TMA: words, zeros and scales, activations --> a ring of stages in shared memory
    the others      ld.shared.v4: a lane's four words of a tile, unpacked by `unpack.py`
                    wgmma from registers, asynchronous ("swap AB": the weight is the M operand);
                    both in the order that `products.py` has found best
                    a tile's sums to its owner or to y: `sums.py`

No barrier of the group in the loop (`ptx.py`): each warp waits for stages and frees them by itself.
Programmatic dependent launch as in `invariant.py`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .copies import copy_activations, copy_weights, stage_bytes
from .products import by_chunks, by_slices, places_of_lanes
from .ptx import arrive_at, barriers_asm, expect_asm, wait_for
from .sums import add, by_eight, numbers_of, places_of_sums, send, write
from .tails import MOST_TAILS, add_tail, count_tails, fetch_tail, send_tail
from .tile import HopperTile

FEWEST_CUT = gl.constexpr(128)
"""Rows of x in a tile from which on a CTA may begin elsewhere than at an equal share: it costs 0.05 us."""
PLAIN_1D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def start_copies(
    words_desc, meta_desc, x_desc, ring, slot, k, tile_m, tile_n, pred,
    WEIGHTS: gl.constexpr, ACTIVATIONS: gl.constexpr, TILES: gl.constexpr, GROUP: gl.constexpr,
    READY: gl.constexpr,
):  # fmt: skip
    """Start copying stage `k` of a tile into a slot of the ring; past the end of K zeros arrive."""
    words_ring, meta_ring, x_ring, barriers = ring
    bar = barriers.index(slot)
    if WEIGHTS:
        count: gl.constexpr = stage_bytes(words_ring.shape, meta_ring.shape, x_ring.shape, TILES)
        gl.inline_asm_elementwise(
            expect_asm(READY, count), "=r,r,r", [slot * 8 + k * 0, k * 0 + pred],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        copy_weights(
            words_desc, meta_desc, words_ring, meta_ring, slot, bar, k, tile_n, pred, TILES, GROUP
        )  # fmt: skip
    if ACTIVATIONS:
        copy_activations(x_desc, x_ring, slot, bar, k, tile_m, pred, TILES)


@gluon.jit
def after(tile_n, tile_m, k, base, stages_k, tiles_m):
    """The place one stage on: along K, then the next rows of x, then the next of the weight."""
    k += 1
    over = k == stages_k
    k = gl.where(over, base, k)
    tile_m = gl.where(over, tile_m + 1, tile_m)
    over = tile_m == tiles_m
    return gl.where(over, tile_n + 1, tile_n), gl.where(over, 0, tile_m), k


@gluon.jit
def start_first(
    words_desc, meta_desc, x_desc, ring, place, base, number, stages_k, tiles_m,
    WEIGHTS: gl.constexpr, ACTIVATIONS: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
    GROUP: gl.constexpr, READY: gl.constexpr,
):  # fmt: skip
    """Start copying to all slots of the empty ring; the place behind them."""
    n, m, k = place
    for slot in gl.static_range(STAGES):
        start_copies(
            words_desc, meta_desc, x_desc, ring, slot, k, m, n, slot < number, WEIGHTS, ACTIVATIONS,
            TILES, GROUP, READY,
        )  # fmt: skip
        n, m, k = after(n, m, k, base, stages_k, tiles_m)
    return n, m, k


@gluon.jit
def produce(
    x_desc, words_desc, meta_desc, ring, tails, place, base, number, stages_k, tiles_m,
    BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, GROUP: gl.constexpr,
    WORDS: gl.constexpr, READY: gl.constexpr, FREE: gl.constexpr, SENT: gl.constexpr, TAILS: gl.constexpr,
):  # fmt: skip
    """The one warp that starts the copies of `number` stages from `place` on."""
    # The weights do not depend on the kernel before this one, so the first of them need not wait for its end;
    # the activations do.
    start_first(
        words_desc, meta_desc, x_desc, ring, place, base, number, stages_k, tiles_m, True, False,
        STAGES, TILES, GROUP, READY,
    )  # fmt: skip
    gdc_wait()
    n, m, k = start_first(
        words_desc, meta_desc, x_desc, ring, place, base, number, stages_k, tiles_m, False, True,
        STAGES, TILES, GROUP, READY,
    )  # fmt: skip
    slot = 0
    phase = 0
    for _stage in range(STAGES, number):
        wait_for(FREE + slot * 8, phase)
        start_copies(
            words_desc, meta_desc, x_desc, ring, slot, k, m, n, True, True, True, TILES, GROUP, READY
        )
        wraps = slot + 1 == STAGES
        slot = gl.where(wraps, 0, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
        n, m, k = after(n, m, k, base, stages_k, tiles_m)
    if TAILS:
        partials, arrivals, owner = tails
        if base > 0:
            count_tails(arrivals, owner, number // (stages_k - base), SENT)
        else:
            fetch_tail(partials, arrivals, owner, number, BN, BM, STAGES, TILES, WORDS, READY, FREE)


@gluon.jit
def consume(
    x_ring, y, partials, arrivals, place, base, number, stages_k, tiles_m, M, N, index, owner, last,
    BN: gl.constexpr, BM: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, SLICES: gl.constexpr, QUADS: gl.constexpr, UNIT: gl.constexpr,
    WORDS: gl.constexpr, META: gl.constexpr, META_BYTES: gl.constexpr, READY: gl.constexpr,
    FREE: gl.constexpr, SENT: gl.constexpr, TAILS: gl.constexpr, SCALED: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """What `number` stages from `place` on give, tile by tile."""
    lane, row = places_of_lanes(BN, TILES)
    tile_n, tile_m, piece = place
    left = number
    slot = number * 0
    phase = 0
    sent = SENT + number * 0
    while left > 0:
        piece_end = gl.minimum(stages_k, piece + left)
        if SLICES == 1:
            accumulator, slot, phase = by_slices(
                x_ring, slot, phase, piece, piece_end, lane, row, BN, BM, GROUP, FRACTIONAL, HALF, STAGES,
                TILES, WORDS, META, META_BYTES, READY, FREE, MMA,
            )  # fmt: skip
        else:
            accumulator, slot, phase = by_chunks(
                x_ring, slot, phase, piece, piece_end, lane, row, BN, BM, GROUP, FRACTIONAL, HALF, STAGES,
                TILES, SLICES, UNIT, WORDS, META, META_BYTES, READY, FREE, SCALED, MMA,
            )  # fmt: skip
        previous = gl.where(slot - 1 < 0, slot - 1 + STAGES, slot - 1)
        arrive_at(FREE + previous * 8, slot >= 0)
        parts = by_eight(accumulator, BN, BM)
        at = places_of_sums(BN)
        if piece > 0:
            if TAILS:
                send_tail(parts, partials, at, owner, sent, BN, BM)
                owner += 1
                sent += 8
            else:
                send(parts, partials, arrivals, at, index, owner, BN, BM)
        else:
            # Who has the first part of a tile owns it.
            if TAILS:
                parts = add_tail(parts, slot, phase, at, BN, BM, TILES, WORDS, READY)
            elif piece_end < stages_k:
                parts = add(parts, partials, arrivals, at, index, last, BN, BM)
            write(parts, y, tile_n, tile_m, M, N, BN, BM, HALF, QUADS)
        left -= piece_end - piece
        piece = base
        tile_m += 1
        over = tile_m == tiles_m
        tile_n = gl.where(over, tile_n + 1, tile_n)
        tile_m = gl.where(over, 0, tile_m)


@gluon.jit
def quotient(a, b, inverse):
    """a // b, not negative and under 2^22, by the fp32 number nearest to 1 / b.

    Three of the compiler's own divisions one after another take 0.4 us, before the first byte is asked for.
    """
    guess = (a.to(gl.float32) * inverse).to(gl.int32)
    rest = a - guess * b
    return guess + (rest >= b).to(gl.int32) - (rest < 0).to(gl.int32)


@gluon.jit
def begin_of(index, total, count, of_count, turn, of_turn, cuts, CUTS: gl.constexpr):
    """The first unit of a CTA's share: `cuts` has for each of `turn` CTAs a signed byte to go further."""
    begin = quotient(index * total, count, of_count)
    if CUTS:
        place = index - quotient(index, turn, of_turn) * turn
        begin += (cuts << (24 - place * 8)) >> 24
    return begin


@gluon.jit(
    do_not_specialize=["M", "N", "tiles_m", "units_k", "total", "count", "turn", "cuts", "head", "each"]
)
def int4_shares_kernel(
    x_desc, words_desc, meta_desc, y, partials, arrivals, M, N, tiles_m, units_k, total, count, turn,
    cuts, head, each, of_tiles_m, of_units_k, of_total, of_count, of_turn,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, SLICES: gl.constexpr, QUADS: gl.constexpr,
    UNIT: gl.constexpr, SCALED: gl.constexpr, TAILS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BN // 16, 1], [16, BM, 16])
    index = gl.num_programs(0) - 1 - gl.program_id(0)
    if TAILS:
        tiles = quotient(total, units_k, of_units_k)
        behind = index - tiles
        begin = gl.where(behind >= 0, head, 0)
        tile = gl.where(behind >= 0, behind * each, index)
        number = gl.where(behind >= 0, (units_k - head) * each, head) * UNIT
        base = begin * UNIT
    else:
        begin = begin_of(index, total, count, of_count, turn, of_turn, cuts, BM >= FEWEST_CUT)
        end = begin_of(index + 1, total, count, of_count, turn, of_turn, cuts, BM >= FEWEST_CUT)
        tile = quotient(begin, units_k, of_units_k)
        number = (end - begin) * UNIT
        begin -= tile * units_k
        base = 0
    tile_n = tile
    tile_m = tile * 0
    if tiles_m > 1:
        tile_n = quotient(tile, tiles_m, of_tiles_m)
        tile_m = tile - tile_n * tiles_m
    place = (tile_n, tile_m, begin * UNIT)
    stages_k = units_k * UNIT

    # Shared memory, each part on 1024 bytes: x, words, zeros and scales of all stages, then the barriers.
    meta_rows: gl.constexpr = meta_desc.block_shape[0]
    META_BYTES: gl.constexpr = meta_rows * BN * 4
    WORDS: gl.constexpr = STAGES * BM * TILES * 128
    META: gl.constexpr = WORDS + (STAGES * BN * TILES * 32 + 1023) // 1024 * 1024
    READY: gl.constexpr = META + (STAGES * META_BYTES + 1023) // 1024 * 1024
    FREE: gl.constexpr = READY + 128
    SENT: gl.constexpr = FREE + 128
    memory = gl.allocate_shared_memory(gl.int8, [READY // 1024 + 1, 1024], PLAIN_1D)
    x_ring = memory.index(0)._reinterpret(dtype, [STAGES, BM, TILES * 64], x_desc.layout)
    words_ring = memory.index(WORDS // 1024)._reinterpret(
        gl.int32, [STAGES, BN // 64, TILES * 8, 64], words_desc.layout
    )
    meta_ring = memory.index(META // 1024)._reinterpret(gl.int32, [STAGES, meta_rows, BN], meta_desc.layout)
    barriers = memory.index(READY // 1024)._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    gl.inline_asm_elementwise(
        barriers_asm(READY, FREE, SENT, STAGES, MOST_TAILS if TAILS else 0, BN // 16),
        "=r,r",
        [M],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()
    gdc_launch_dependents()
    ring = (words_ring, meta_ring, x_ring, barriers)
    owner = tile
    last = index
    tails = (partials, arrivals, tile) if TAILS else ()
    if not TAILS:
        # Who has the first unit of the first tile, and who the last of the last: unit u is with the last CTA
        # that begins no later. `cuts` move no beginning from one tile into another.
        owner = quotient((tile * units_k + 1) * count - 1, total, of_total)
        last_tile = quotient(end - 1, units_k, of_units_k)
        last = quotient((last_tile + 1) * units_k * count - 1, total, of_total)
    gl.warp_specialize([
        (consume, (x_ring, y, partials, arrivals, place, base, number, stages_k, tiles_m, M, N, index, owner,
                   last, BN, BM, GROUP, FRACTIONAL, HALF, STAGES, TILES, SLICES, QUADS, UNIT, WORDS, META,
                   META_BYTES, READY, FREE, SENT, TAILS, SCALED, mma)),
        (produce, (x_desc, words_desc, meta_desc, ring, tails, place, base, number, stages_k, tiles_m,
                   BN, BM, STAGES, TILES, GROUP, WORDS, READY, FREE, SENT, TAILS)),
    ], [1], [24])  # fmt: skip


@dataclass(frozen=True)
class Tile(HopperTile):
    """Slices unpacked together: 4 or 8 by chunks, or 1, between products."""

    @property
    def unit_stages(self) -> int:
        """Stages in a unit of work: of two chunks at least, for `by_chunks`."""
        return 2 if self.tiles * 4 == self.slices else 1

    @property
    def sums(self) -> int:
        """fp32 numbers of scratch memory that the sums of a CTA take."""
        return numbers_of(self.n, self.m)

    @property
    def unit(self) -> int:
        """Columns of K in a unit of work."""
        return 64 * self.tiles * self.unit_stages


MAX_SCALED_SUMS = 32


def launch(
    x: Tensor,
    words: Tensor,
    meta: Tensor,
    arrivals: Tensor,
    y: Tensor,
    group_size: int,
    fractional: bool,
    tile: Tile,
    count: int,
    cuts: tuple[int, ...] = (0,),
    head: int = 0,
) -> None:
    """y by `count` CTAs: one for each tile of y, or as many as the chip holds at once, at most `arrivals`.

    head: the units of K that a tile's own CTA has, if the CTAs beyond one a tile have the others of so many
    tiles each; tiles of 64 rows of the weight, 128 of x or more. Or 0.

    cuts: by how many units of K later than at an equal share each of so many CTAs, at most four, begins,
    time after time; within a tile, and the first of them at an equal one.
    """
    m, n = y.shape
    tiles_m = triton.cdiv(m, tile.m)
    units_k = triton.cdiv(x.shape[1], tile.unit)
    tiles = tile.number(m, n)
    total = tiles * units_k
    scratch = 1 if count == tiles else count * tile.sums
    each = tiles // (count - tiles) if head else 0
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    int4_shares_kernel[(count,)](
        *tile.descriptors(x, words, meta, group_size),
        y, partials, arrivals, m, n, tiles_m, units_k, total, count, len(cuts), bytes_of(cuts),
        head, each,
        1 / tiles_m, 1 / units_k, 1 / total, 1 / count, 1 / len(cuts),
        **constants(tile, group_size, fractional, x.dtype == torch.float16, n, head > 0),
        **tile.options(),
    )  # fmt: skip


@lru_cache
def bytes_of(cuts: tuple[int, ...]) -> int:
    """Up to four cuts as the signed bytes of an int32, the first one lowest."""
    return int.from_bytes(bytes(cut & 255 for cut in cuts).ljust(4, b"\0"), "little", signed=True)


def constants(
    tile: Tile, group_size: int, fractional: bool, half: bool, n: int, tails: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for; of n only whether rows of y have whole groups of four.

    With few rows of x, where a chunk is a group, the scale multiplies its sums, fewer than its weights.
    """
    scales_sums = tile.m <= MAX_SCALED_SUMS and tile.slices == 8 and group_size == 128 and not fractional
    return tile.constants(group_size, fractional, half) | {
        "QUADS": n % 4 == 0,
        "UNIT": tile.unit_stages,
        "SCALED": not scales_sums,
        "TAILS": tails,
    }
