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

Some numbers of tiles are cut otherwise, a head and a tail each: `tail_prefetch.py`.

All CTAs read x, and where many of them are at the same columns at the same time, L2 sends these to several at
once. So a number of CTAs that cuts few tiles alike is worth more than one that keeps every multiprocessor
busy: 80 tiles of 256 rows by 120 CTAs, two tiles for three of them, take 40 us, by 132 CTAs 51.

    producer warp   TMA: words, zeros and scales, activations --> a ring of stages in shared memory
    the others      ld.shared.v4: a lane's four words of a tile, unpacked by `unpack.py`
                    wgmma from registers, asynchronous ("swap AB": the weight is the M operand);
                    both in the order that `mainloop.py` has found best
                    a tile's sums to its owner or to y: `epilogue.py`

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

from .epilogue import add, partial_floats, partial_offsets, send, split_accumulator, write
from .mainloop import chunked_mainloop, lane_offsets, sliced_mainloop
from .ptx import expect_bytes_asm, init_mbarriers_asm, mbarrier_arrive, mbarrier_wait
from .tail_prefetch import MAX_TAILS, add_tail, prefetch_tail, send_tail, signal_tails
from .tile import HopperTile
from .tma_loads import load_activations, load_weights, stage_bytes

OFFSETS_FROM_ROWS = gl.constexpr(128)
"""Rows of x in a tile from which on a CTA may begin elsewhere than at an equal share: it costs 0.05 us."""
PLAIN_1D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_stage(
    words_desc, scale_desc, x_desc, ring, slot, k, tile_m, tile_n, pred,
    WEIGHTS: gl.constexpr, ACTIVATIONS: gl.constexpr, K_TILES: gl.constexpr, GROUP: gl.constexpr,
    FULL: gl.constexpr,
):  # fmt: skip
    """Start copying stage `k` of a tile into a slot of the ring; past the end of K zeros arrive."""
    words_ring, scale_ring, x_ring, barriers = ring
    bar = barriers.index(slot)
    if WEIGHTS:
        count: gl.constexpr = stage_bytes(words_ring.shape, scale_ring.shape, x_ring.shape, K_TILES)
        gl.inline_asm_elementwise(
            expect_bytes_asm(FULL, count), "=r,r,r", [slot * 8 + k * 0, k * 0 + pred],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        load_weights(
            words_desc, scale_desc, words_ring, scale_ring, slot, bar, k, tile_n, pred, K_TILES, GROUP
        )  # fmt: skip
    if ACTIVATIONS:
        load_activations(x_desc, x_ring, slot, bar, k, tile_m, pred, K_TILES)


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
def fill_ring(
    words_desc, scale_desc, x_desc, ring, place, base, number, stages_k, tiles_m,
    WEIGHTS: gl.constexpr, ACTIVATIONS: gl.constexpr, STAGES: gl.constexpr, K_TILES: gl.constexpr,
    GROUP: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Start copying to all slots of the empty ring; the place behind them."""
    n, m, k = place
    for slot in gl.static_range(STAGES):
        load_stage(
            words_desc, scale_desc, x_desc, ring, slot, k, m, n, slot < number, WEIGHTS, ACTIVATIONS,
            K_TILES, GROUP, FULL,
        )  # fmt: skip
        n, m, k = after(n, m, k, base, stages_k, tiles_m)
    return n, m, k


@gluon.jit
def produce(
    x_desc, words_desc, scale_desc, ring, tails, place, base, number, stages_k, tiles_m,
    BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, K_TILES: gl.constexpr, GROUP: gl.constexpr,
    WORDS: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr, SENT: gl.constexpr, TAILS: gl.constexpr,
):  # fmt: skip
    """The one warp that starts the copies of `number` stages from `place` on."""
    # The weights do not depend on the kernel before this one, so the first of them need not wait for its end;
    # the activations do.
    fill_ring(
        words_desc, scale_desc, x_desc, ring, place, base, number, stages_k, tiles_m, True, False,
        STAGES, K_TILES, GROUP, FULL,
    )  # fmt: skip
    gdc_wait()
    n, m, k = fill_ring(
        words_desc, scale_desc, x_desc, ring, place, base, number, stages_k, tiles_m, False, True,
        STAGES, K_TILES, GROUP, FULL,
    )  # fmt: skip
    slot = 0
    phase = 0
    for _stage in range(STAGES, number):
        mbarrier_wait(EMPTY + slot * 8, phase)
        load_stage(
            words_desc, scale_desc, x_desc, ring, slot, k, m, n, True, True, True, K_TILES, GROUP, FULL
        )
        wraps = slot + 1 == STAGES
        slot = gl.where(wraps, 0, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
        n, m, k = after(n, m, k, base, stages_k, tiles_m)
    if TAILS:
        partials, semaphores, owner = tails
        if base > 0:
            signal_tails(semaphores, owner, number // (stages_k - base), SENT)
        else:
            prefetch_tail(partials, semaphores, owner, number, BN, BM, STAGES, K_TILES, WORDS, FULL, EMPTY)


@gluon.jit
def consume(
    x_ring, y, partials, semaphores, place, base, number, stages_k, tiles_m, M, N, index, owner, last,
    BN: gl.constexpr, BM: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, K_TILES: gl.constexpr, SLICES: gl.constexpr, VECTOR_STORE: gl.constexpr, UNIT: gl.constexpr,
    WORDS: gl.constexpr, SCALES: gl.constexpr, SCALE_BYTES: gl.constexpr, FULL: gl.constexpr,
    EMPTY: gl.constexpr, SENT: gl.constexpr, TAILS: gl.constexpr, SCALE_WEIGHTS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """What `number` stages from `place` on give, tile by tile."""
    lane, row = lane_offsets(BN, K_TILES)
    tile_n, tile_m, piece = place
    left = number
    slot = number * 0
    phase = 0
    sent = SENT + number * 0
    while left > 0:
        piece_end = gl.minimum(stages_k, piece + left)
        if SLICES == 1:
            accumulator, slot, phase = sliced_mainloop(
                x_ring, slot, phase, piece, piece_end, lane, row, BN, BM, GROUP, FRACTIONAL, HALF, STAGES,
                K_TILES, WORDS, SCALES, SCALE_BYTES, FULL, EMPTY, MMA,
            )  # fmt: skip
        else:
            accumulator, slot, phase = chunked_mainloop(
                x_ring, slot, phase, piece, piece_end, lane, row, BN, BM, GROUP, FRACTIONAL, HALF, STAGES,
                K_TILES, SLICES, UNIT, WORDS, SCALES, SCALE_BYTES, FULL, EMPTY, SCALE_WEIGHTS, MMA,
            )  # fmt: skip
        previous = gl.where(slot - 1 < 0, slot - 1 + STAGES, slot - 1)
        mbarrier_arrive(EMPTY + previous * 8, slot >= 0)
        parts = split_accumulator(accumulator, BN, BM)
        at = partial_offsets(BN)
        if piece > 0:
            if TAILS:
                send_tail(parts, partials, at, owner, sent, BN, BM)
                owner += 1
                sent += 8
            else:
                send(parts, partials, semaphores, at, index, owner, BN, BM)
        else:
            # Who has the first part of a tile owns it.
            if TAILS:
                parts = add_tail(parts, slot, phase, at, BN, BM, K_TILES, WORDS, FULL)
            elif piece_end < stages_k:
                parts = add(parts, partials, semaphores, at, index, last, BN, BM)
            write(parts, y, tile_n, tile_m, M, N, BN, BM, HALF, VECTOR_STORE)
        left -= piece_end - piece
        piece = base
        tile_m += 1
        over = tile_m == tiles_m
        tile_n = gl.where(over, tile_n + 1, tile_n)
        tile_m = gl.where(over, 0, tile_m)


@gluon.jit
def fast_divide(a, b, inverse):
    """a // b, not negative and under 2^22, by the fp32 number nearest to 1 / b.

    Three of the compiler's own divisions one after another take 0.4 us, before the first byte is asked for.
    """
    guess = (a.to(gl.float32) * inverse).to(gl.int32)
    rest = a - guess * b
    return guess + (rest >= b).to(gl.int32) - (rest < 0).to(gl.int32)


@gluon.jit
def first_iter(index, total, count, inv_ctas, turn, inv_period, cuts, CUTS: gl.constexpr):
    """The first unit of a CTA's share: `cuts` has for each of `turn` CTAs a signed byte to go further."""
    begin = fast_divide(index * total, count, inv_ctas)
    if CUTS:
        place = index - fast_divide(index, turn, inv_period) * turn
        begin += (cuts << (24 - place * 8)) >> 24
    return begin


@gluon.jit(
    do_not_specialize=[
        "M",
        "N",
        "tiles_m",
        "iters_per_tile",
        "total",
        "count",
        "turn",
        "cuts",
        "head",
        "each",
    ]
)
def int4_stream_k_kernel(
    x_desc, words_desc, scale_desc, y, partials, semaphores, M, N, tiles_m, iters_per_tile, total, count, turn,
    cuts, head, each, inv_tiles_m, inv_iters_per_tile, inv_total, inv_ctas, inv_period,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, K_TILES: gl.constexpr, SLICES: gl.constexpr, VECTOR_STORE: gl.constexpr,
    UNIT: gl.constexpr, SCALE_WEIGHTS: gl.constexpr, TAILS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BN // 16, 1], [16, BM, 16])
    index = gl.num_programs(0) - 1 - gl.program_id(0)
    if TAILS:
        tiles = fast_divide(total, iters_per_tile, inv_iters_per_tile)
        behind = index - tiles
        begin = gl.where(behind >= 0, head, 0)
        tile = gl.where(behind >= 0, behind * each, index)
        number = gl.where(behind >= 0, (iters_per_tile - head) * each, head) * UNIT
        base = begin * UNIT
    else:
        begin = first_iter(index, total, count, inv_ctas, turn, inv_period, cuts, BM >= OFFSETS_FROM_ROWS)
        end = first_iter(index + 1, total, count, inv_ctas, turn, inv_period, cuts, BM >= OFFSETS_FROM_ROWS)
        tile = fast_divide(begin, iters_per_tile, inv_iters_per_tile)
        number = (end - begin) * UNIT
        begin -= tile * iters_per_tile
        base = 0
    tile_n = tile
    tile_m = tile * 0
    if tiles_m > 1:
        tile_n = fast_divide(tile, tiles_m, inv_tiles_m)
        tile_m = tile - tile_n * tiles_m
    place = (tile_n, tile_m, begin * UNIT)
    stages_k = iters_per_tile * UNIT

    # Shared memory, each part on 1024 bytes: x, words, zeros and scales of all stages, then the barriers.
    scale_rows: gl.constexpr = scale_desc.block_shape[0]
    SCALE_BYTES: gl.constexpr = scale_rows * BN * 4
    WORDS: gl.constexpr = STAGES * BM * K_TILES * 128
    SCALES: gl.constexpr = WORDS + (STAGES * BN * K_TILES * 32 + 1023) // 1024 * 1024
    FULL: gl.constexpr = SCALES + (STAGES * SCALE_BYTES + 1023) // 1024 * 1024
    EMPTY: gl.constexpr = FULL + 128
    SENT: gl.constexpr = EMPTY + 128
    memory = gl.allocate_shared_memory(gl.int8, [FULL // 1024 + 1, 1024], PLAIN_1D)
    x_ring = memory.index(0)._reinterpret(dtype, [STAGES, BM, K_TILES * 64], x_desc.layout)
    words_ring = memory.index(WORDS // 1024)._reinterpret(
        gl.int32, [STAGES, BN // 64, K_TILES * 8, 64], words_desc.layout
    )
    scale_ring = memory.index(SCALES // 1024)._reinterpret(
        gl.int32, [STAGES, scale_rows, BN], scale_desc.layout
    )
    barriers = memory.index(FULL // 1024)._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    gl.inline_asm_elementwise(
        init_mbarriers_asm(FULL, EMPTY, SENT, STAGES, MAX_TAILS if TAILS else 0, BN // 16),
        "=r,r",
        [M],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()
    gdc_launch_dependents()
    ring = (words_ring, scale_ring, x_ring, barriers)
    owner = tile
    last = index
    tails = (partials, semaphores, tile) if TAILS else ()
    if not TAILS:
        # Who has the first unit of the first tile, and who the last of the last: unit u is with the last CTA
        # that begins no later. `cuts` move no beginning from one tile into another.
        owner = fast_divide((tile * iters_per_tile + 1) * count - 1, total, inv_total)
        last_tile = fast_divide(end - 1, iters_per_tile, inv_iters_per_tile)
        last = fast_divide((last_tile + 1) * iters_per_tile * count - 1, total, inv_total)
    gl.warp_specialize([
        (consume, (x_ring, y, partials, semaphores, place, base, number, stages_k, tiles_m, M, N, index, owner,
                   last, BN, BM, GROUP, FRACTIONAL, HALF, STAGES, K_TILES, SLICES, VECTOR_STORE, UNIT, WORDS, SCALES,
                   SCALE_BYTES, FULL, EMPTY, SENT, TAILS, SCALE_WEIGHTS, mma)),
        (produce, (x_desc, words_desc, scale_desc, ring, tails, place, base, number, stages_k, tiles_m,
                   BN, BM, STAGES, K_TILES, GROUP, WORDS, FULL, EMPTY, SENT, TAILS)),
    ], [1], [24])  # fmt: skip


@dataclass(frozen=True)
class Tile(HopperTile):
    """Slices unpacked together: 4 or 8 by chunks, or 1, between products."""

    @property
    def iter_stages(self) -> int:
        """Stages in a unit of work: of two chunks at least, for `chunked_mainloop`."""
        return 2 if self.k_tiles * 4 == self.slices else 1

    @property
    def sums(self) -> int:
        """fp32 numbers of scratch memory that the sums of a CTA take."""
        return partial_floats(self.n, self.m)

    @property
    def unit(self) -> int:
        """Columns of K in a unit of work."""
        return 64 * self.k_tiles * self.iter_stages


MAX_SCALED_ACCUMULATOR_ROWS = 32


def launch(
    x: Tensor,
    words: Tensor,
    scale_words: Tensor,
    semaphores: Tensor,
    y: Tensor,
    group_size: int,
    fractional: bool,
    tile: Tile,
    num_ctas: int,
    start_offsets: tuple[int, ...] = (0,),
    head_iters: int = 0,
) -> None:
    """y by `count` CTAs: one for each tile of y, or as many as the chip holds at once, at most `semaphores`.

    head: the units of K that a tile's own CTA has, if the CTAs beyond one a tile have the others of so many
    tiles each; tiles of 64 rows of the weight, 128 of x or more. Or 0.

    cuts: by how many units of K later than at an equal share each of so many CTAs, at most four, begins,
    time after time; within a tile, and the first of them at an equal one.
    """
    m, n = y.shape
    tiles_m = triton.cdiv(m, tile.m)
    iters_per_tile = triton.cdiv(x.shape[1], tile.unit)
    tiles = tile.num_tiles(m, n)
    total = tiles * iters_per_tile
    scratch = 1 if num_ctas == tiles else num_ctas * tile.sums
    each = tiles // (num_ctas - tiles) if head_iters else 0
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    int4_stream_k_kernel[(num_ctas,)](
        *tile.descriptors(x, words, scale_words, group_size),
        y, partials, semaphores, m, n, tiles_m, iters_per_tile, total, num_ctas, len(start_offsets), packed_bytes(start_offsets),
        head_iters, each,
        1 / tiles_m, 1 / iters_per_tile, 1 / total, 1 / num_ctas, 1 / len(start_offsets),
        **constants(tile, group_size, fractional, x.dtype == torch.float16, n, head_iters > 0),
        **tile.options(),
    )  # fmt: skip


@lru_cache
def packed_bytes(cuts: tuple[int, ...]) -> int:
    """Up to four cuts as the signed bytes of an int32, the first one lowest."""
    return int.from_bytes(bytes(cut & 255 for cut in cuts).ljust(4, b"\0"), "little", signed=True)


def constants(
    tile: Tile, group_size: int, fractional: bool, half: bool, n: int, tails: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for; of n only whether rows of y have whole groups of four.

    With few rows of x, where a chunk is a group, the scale multiplies its sums, fewer than its weights.
    """
    scales_sums = (
        tile.m <= MAX_SCALED_ACCUMULATOR_ROWS and tile.slices == 8 and group_size == 128 and not fractional
    )
    return tile.constants(group_size, fractional, half) | {
        "VECTOR_STORE": n % 4 == 0,
        "UNIT": tile.iter_stages,
        "SCALE_WEIGHTS": not scales_sums,
        "TAILS": tails,
    }
