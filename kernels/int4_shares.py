"""INT4 product on Hopper, in Gluon: all tiles' K in one row, every CTA an equal share of it.

For up to 512 rows of x, where `int4_waves.py` loses time at the ends of its waves; `int4_hopper.py` says
which serves what. Not for batch-invariant serving: where a tile is cut depends on how many there are.

Shapes: x [M, K], packed weight [N, K] in tiles of 64 rows and 64 columns (`int4_swap_ab.py`), y [M, N].

The tiles of y are numbered down M, then along N, and each has as many units of work as K has 128 or 256
columns; CTA i of C takes the units from i * total / C on, so that it may end one tile, do others whole and
begin one more:

    CTA 0 |-- tile 0 --|- tile 1           the CTA with a tile's first unit owns it: it adds the others'
    CTA 1               -|-- tile 2 --|-   fp32 sums to its own, in order of K, so the bits are the same
    CTA 2                    tile 3 ---|   every time

An owner waits for CTAs with higher numbers, which the grid starts first (it counts backwards), so it never
waits for one that has yet to find room. With as many CTAs as tiles each does one, and nobody waits.

All CTAs read x, and where many of them are at the same columns at the same time, L2 sends these to several at
once. So a number of CTAs that cuts few tiles alike is worth more than one that keeps every multiprocessor
busy: 80 tiles of 256 rows by 120 CTAs, two tiles for three of them, take 40 us, by 132 CTAs 51.

    producer warp   TMA: words, zeros and scales, activations --> a ring of stages in shared memory
    the others      ld.shared.v4: a lane's four words of a tile, unpacked by `int4_unpack.py`
                    wgmma from registers, asynchronous ("swap AB": the weight is the M operand)
                    a tile's sums to its owner or to y: `int4_sums.py`

No barrier of the group in the loop (`int4_ptx.py`): each warp waits for stages and frees them by itself.
Programmatic dependent launch as in `int4_waves.py`.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .int4_copies import copy_activations, copy_weights, stage_bytes
from .int4_ptx import arrive_at, barriers_asm, expect_asm, load4_asm, load_asm, load_pair_asm, wait_for
from .int4_sums import finish
from .int4_unpack import meta_layout, operand_of, scale_of, words_layout, x_layout, zero_and_scale

PLAIN_1D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def lane_layout(warps):
    """[row / 16, r, t]: one element a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0]][: 2 if warps == 4 else 3],
        block_bases=[],
        shape=[warps, 8, 4],
    )


@gluon.jit
def read_words(stage, lane, OFFSET: gl.constexpr):
    """A lane's four words of one tile of 64 columns, [row / 16, r, t, v, u]."""
    a, b, c, d = gl.inline_asm_elementwise(
        load4_asm(OFFSET), "=r,=r,=r,=r,r", [lane + stage],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def read_scales(
    stage, row, OFFSET: gl.constexpr, STEP: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr,
    HALF: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """For each group of a tile the zeros and scales of the lane's rows r and r + 8."""
    scales = ()
    for group in gl.static_range(64 // GROUP if GROUP < 64 else 1):
        a, b = gl.inline_asm_elementwise(
            load_pair_asm(OFFSET + group * STEP, 32), "=r,=r,r", [row + stage],
            dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        a1, a2 = zero_and_scale(a, FRACTIONAL, HALF, SCALED)
        b1, b2 = zero_and_scale(b, FRACTIONAL, HALF, SCALED)
        first = gl.join(gl.join(a1, a1), gl.join(b1, b1))
        second = gl.join(gl.join(a2, a2), gl.join(b2, b2))
        scales = scales + (first, second)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@gluon.jit
def read_sum_scales(slot, CHUNK: gl.constexpr, META: gl.constexpr, BN: gl.constexpr, META_BYTES: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """The scales of chunk `CHUNK`, a group of 128 columns, as they multiply its sums: [BN, 1]."""
    row = gl.arange(0, BN, gl.SliceLayout(1, MMA))
    meta = gl.inline_asm_elementwise(
        load_asm(META + CHUNK * BN * 4), "=r,r", [slot * META_BYTES + row * 4],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return gl.expand_dims(scale_of(meta), 1)


@gluon.jit
def read_operand(
    slot, lane, row, CHUNK: gl.constexpr, BN: gl.constexpr, SLICES: gl.constexpr, TILES: gl.constexpr,
    GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr, SCALED: gl.constexpr,
    MMA: gl.constexpr, WORDS: gl.constexpr, META: gl.constexpr, META_BYTES: gl.constexpr,
):  # fmt: skip
    """Chunk `CHUNK` of a stage, `SLICES` slices of 16 columns, as wgmma's operand [BN, 16 * SLICES].

    Beside it the scales of its sums, where these are to be multiplied by them.
    """
    tile: gl.constexpr = CHUNK * SLICES // 4
    step: gl.constexpr = BN * 4
    words_at = slot * (BN * TILES * 32)
    meta_at = slot * META_BYTES
    words = read_words(words_at, lane, WORDS + tile * 2048)
    scales = read_scales(
        meta_at, row, META + tile * 64 // GROUP * step, step, GROUP, FRACTIONAL, HALF, SCALED
    )
    more_words = words
    more_scales = scales
    if SLICES == 8:
        more_words = read_words(words_at, lane, WORDS + (tile + 1) * 2048)
        if GROUP < 128:
            more_scales = read_scales(
                meta_at, row, META + (tile + 1) * 64 // GROUP * step, step, GROUP, FRACTIONAL, HALF, SCALED
            )
    operand = operand_of(
        words, scales, more_words, more_scales, CHUNK, BN, SLICES, GROUP, FRACTIONAL, HALF, SCALED, MMA
    )
    if SCALED:
        return operand, 1.0
    else:
        return operand, read_sum_scales(slot, CHUNK, META, BN, META_BYTES, MMA)


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
def after(tile_n, tile_m, k, stages_k, tiles_m):
    """The place one stage on: along K, then the next rows of x, then the next of the weight."""
    k += 1
    over = k == stages_k
    k = gl.where(over, 0, k)
    tile_m = gl.where(over, tile_m + 1, tile_m)
    over = tile_m == tiles_m
    return gl.where(over, tile_n + 1, tile_n), gl.where(over, 0, tile_m), k


@gluon.jit
def produce(
    x_desc, words_desc, meta_desc, ring, place, number, stages_k, tiles_m,
    STAGES: gl.constexpr, TILES: gl.constexpr, GROUP: gl.constexpr, READY: gl.constexpr, FREE: gl.constexpr,
):  # fmt: skip
    """The one warp that starts the copies of `number` stages from `place` on."""
    tile_n, tile_m, first = place
    # The weights do not depend on the kernel before this one, so the first of them need not wait for its end;
    # the activations do.
    n = tile_n
    m = tile_m
    k = first
    for slot in gl.static_range(STAGES):
        start_copies(
            words_desc, meta_desc, x_desc, ring, slot, k, m, n, slot < number, True, False,
            TILES, GROUP, READY,
        )  # fmt: skip
        n, m, k = after(n, m, k, stages_k, tiles_m)
    gdc_wait()
    n = tile_n
    m = tile_m
    k = first
    for slot in gl.static_range(STAGES):
        start_copies(
            words_desc, meta_desc, x_desc, ring, slot, k, m, n, slot < number, False, True,
            TILES, GROUP, READY,
        )  # fmt: skip
        n, m, k = after(n, m, k, stages_k, tiles_m)
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
        n, m, k = after(n, m, k, stages_k, tiles_m)


@gluon.jit
def consume(
    x_ring, y, partials, arrivals, place, number, stages_k, tiles_m, M, N, index, owner, last,
    BN: gl.constexpr, BM: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, SLICES: gl.constexpr, QUADS: gl.constexpr,
    WORDS: gl.constexpr, META: gl.constexpr, META_BYTES: gl.constexpr, READY: gl.constexpr,
    FREE: gl.constexpr, SCALED: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The products of `number` stages from `place` on, tile by tile.

    A turn of the inner loop takes an even number of chunks, so that the operand in flight and the one being
    made keep registers of their own; unpacking one chunk runs beside the product of the one before it.
    """
    chunks: gl.constexpr = TILES * 4 // SLICES
    step: gl.constexpr = 2 if chunks == 1 else 1
    spread: gl.constexpr = lane_layout(BN // 16)
    of_warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, spread))
    of_r: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, spread))
    of_t: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, spread))
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, BN // 16, of_warp), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, of_r), 0), 2)
    t = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, of_t), 0), 1)
    lane = (warp // 4) * (TILES * 2048) + ((warp % 4) * 32 + r * 4 + t) * 16
    row = (warp * 16 + r) * 4 + t * 0

    tile_n, tile_m, piece = place
    left = number
    slot = number * 0
    phase = 0
    while left > 0:
        piece_end = gl.minimum(stages_k, piece + left)
        accumulator = gl.zeros([BN, BM], gl.float32, MMA)
        wait_for(READY + slot * 8, phase)
        weight, scale = read_operand(
            slot, lane, row, 0, BN, SLICES, TILES, GROUP, FRACTIONAL, HALF, SCALED, MMA,
            WORDS, META, META_BYTES,
        )  # fmt: skip
        before = weight
        for turn in range(piece, piece_end, step):
            for i in gl.static_range(step):
                stage = turn + i
                wraps = slot + 1 >= STAGES
                following = gl.where(wraps, slot + 1 - STAGES, slot + 1)
                for chunk in gl.static_range(chunks):
                    x_chunk = (
                        x_ring.index(slot).slice(chunk * 16 * SLICES, 16 * SLICES, dim=1).permute((1, 0))
                    )
                    products = warpgroup_mma(weight, x_chunk, accumulator, use_acc=SCALED, is_async=True)
                    scale_before = scale
                    if SCALED:
                        # At most this product is in flight: the one before it is done.
                        accumulator, before = warpgroup_mma_wait(1, deps=[products, before])
                    before = weight
                    if chunk == 0:
                        previous = gl.where(slot - 1 < 0, slot - 1 + STAGES, slot - 1)
                        arrive_at(FREE + previous * 8, stage > piece)
                    if chunk + 1 < chunks:
                        weight, scale = read_operand(
                            slot, lane, row, chunk + 1, BN, SLICES, TILES, GROUP, FRACTIONAL, HALF, SCALED,
                            MMA, WORDS, META, META_BYTES,
                        )  # fmt: skip
                    else:
                        # Behind the last stage of a piece this unpacks what is not used.
                        phase = gl.where(wraps, phase ^ 1, phase)
                        if stage + 1 < piece_end:
                            wait_for(READY + following * 8, phase)
                        weight, scale = read_operand(
                            following, lane, row, 0, BN, SLICES, TILES, GROUP, FRACTIONAL, HALF, SCALED, MMA,
                            WORDS, META, META_BYTES,
                        )  # fmt: skip
                    if not SCALED:
                        products, before = warpgroup_mma_wait(0, deps=[products, before])
                        accumulator += products * scale_before
                slot = following
        if SCALED:
            accumulator, before = warpgroup_mma_wait(0, deps=[accumulator, before])
        previous = gl.where(slot - 1 < 0, slot - 1 + STAGES, slot - 1)
        arrive_at(FREE + previous * 8, slot >= 0)
        finish(
            accumulator, y, partials, arrivals, tile_n, tile_m, piece, piece_end, stages_k, M, N, index,
            owner, last, BN, BM, HALF, QUADS,
        )  # fmt: skip
        left -= piece_end - piece
        piece = 0
        tile_m += 1
        over = tile_m == tiles_m
        tile_n = gl.where(over, tile_n + 1, tile_n)
        tile_m = gl.where(over, 0, tile_m)


@gluon.jit
def quotient(a, b, inverse):
    """a // b, not negative and under 2^20, by the fp32 number nearest to 1 / b.

    Three of the compiler's own divisions one after another take 0.4 us, before the first byte is asked for.
    """
    guess = (a.to(gl.float32) * inverse).to(gl.int32)
    rest = a - guess * b
    return guess + (rest >= b).to(gl.int32) - (rest < 0).to(gl.int32)


@gluon.jit(do_not_specialize=["M", "N", "tiles_m", "units_k", "total", "count"])
def int4_shares_kernel(
    x_desc, words_desc, meta_desc, y, partials, arrivals, M, N, tiles_m, units_k, total, count,
    of_tiles_m, of_units_k, of_total, of_count,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, SLICES: gl.constexpr, QUADS: gl.constexpr,
    UNIT: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BN // 16, 1], [16, BM, 16])
    index = gl.num_programs(0) - 1 - gl.program_id(0)
    begin = quotient(index * total, count, of_count)
    end = quotient((index + 1) * total, count, of_count)
    tile = quotient(begin, units_k, of_units_k)
    tile_n = tile
    tile_m = tile * 0
    if tiles_m > 1:
        tile_n = quotient(tile, tiles_m, of_tiles_m)
        tile_m = tile - tile_n * tiles_m
    place = (tile_n, tile_m, (begin - tile * units_k) * UNIT)
    number = (end - begin) * UNIT
    stages_k = units_k * UNIT

    # Shared memory, each part on 1024 bytes: x, words, zeros and scales of all stages, then the barriers.
    meta_rows: gl.constexpr = meta_desc.block_shape[0]
    META_BYTES: gl.constexpr = meta_rows * BN * 4
    WORDS: gl.constexpr = STAGES * BM * TILES * 128
    META: gl.constexpr = WORDS + (STAGES * BN * TILES * 32 + 1023) // 1024 * 1024
    READY: gl.constexpr = META + (STAGES * META_BYTES + 1023) // 1024 * 1024
    FREE: gl.constexpr = READY + 128
    memory = gl.allocate_shared_memory(gl.int8, [READY // 1024 + 1, 1024], PLAIN_1D)
    x_ring = memory.index(0)._reinterpret(dtype, [STAGES, BM, TILES * 64], x_desc.layout)
    words_ring = memory.index(WORDS // 1024)._reinterpret(
        gl.int32, [STAGES, BN // 64, TILES * 8, 64], words_desc.layout
    )
    meta_ring = memory.index(META // 1024)._reinterpret(gl.int32, [STAGES, meta_rows, BN], meta_desc.layout)
    barriers = memory.index(READY // 1024)._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    gl.inline_asm_elementwise(
        barriers_asm(READY, FREE, STAGES, BN // 16), "=r,r", [M], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.thread_barrier()
    gdc_launch_dependents()
    ring = (words_ring, meta_ring, x_ring, barriers)
    # Who has the first unit of the first tile, and who the last of the last: unit u is with the last CTA that
    # begins no later.
    owner = quotient((tile * units_k + 1) * count - 1, total, of_total)
    last_tile = quotient(end - 1, units_k, of_units_k)
    last = quotient((last_tile + 1) * units_k * count - 1, total, of_total)
    gl.warp_specialize([
        (consume, (x_ring, y, partials, arrivals, place, number, stages_k, tiles_m, M, N, index, owner, last,
                   BN, BM, GROUP, FRACTIONAL, HALF, STAGES, TILES, SLICES, QUADS,
                   WORDS, META, META_BYTES, READY, FREE, SCALED, mma)),
        (produce, (x_desc, words_desc, meta_desc, ring, place, number, stages_k, tiles_m,
                   STAGES, TILES, GROUP, READY, FREE)),
    ], [1], [24])  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """One compiled form of the kernel: a tile of y, and how many of its CTAs a multiprocessor holds.

    tiles    tiles of 64 columns in a stage: 1, 2 or 4; slices: of 16 columns unpacked together: 4 or 8
    """

    m: int
    n: int
    tiles: int
    stages: int
    slices: int
    registers: int
    resident: int

    @property
    def unit_stages(self) -> int:
        """Stages in a unit of work: an even number of chunks, for `consume`."""
        return 2 if self.tiles * 4 == self.slices else 1

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
) -> None:
    """y by `count` CTAs: one for each tile of y, or as many as the chip holds at once, at most `arrivals`."""
    m, n = y.shape
    row_tiles, k_tiles, _ = words.shape
    tiles_m = triton.cdiv(m, tile.m)
    units_k = triton.cdiv(x.shape[1], tile.unit)
    tiles = tiles_m * triton.cdiv(n, tile.n)
    total = tiles * units_k
    scratch = 1 if count == tiles else count * tile.n * tile.m
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    meta_rows = max(1, tile.tiles * 64 // group_size)
    word_rows = words.view(row_tiles, k_tiles * 8, 64)
    int4_shares_kernel[(count,)](
        TensorDescriptor.from_tensor(x, [tile.m, tile.tiles * 64], x_layout()),
        TensorDescriptor.from_tensor(word_rows, [tile.n // 64, tile.tiles * 8, 64], words_layout()),
        TensorDescriptor.from_tensor(meta, [meta_rows, tile.n], meta_layout()),
        y, partials, arrivals, m, n, tiles_m, units_k, total, count,
        1 / tiles_m, 1 / units_k, 1 / total, 1 / count,
        **constants(tile, group_size, fractional, x.dtype == torch.float16, n % 4 == 0),
        num_warps=tile.n // 16,
        maxnreg=tile.registers,
        launch_pdl=True,
    )  # fmt: skip


def constants(
    tile: Tile, group_size: int, fractional: bool, half: bool, quads: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for; `quads` where a row of y has whole groups of four.

    With few rows of x, where a chunk is a group, the scale multiplies its sums, fewer than its weights.
    """
    scales_sums = tile.m <= MAX_SCALED_SUMS and tile.slices == 8 and group_size == 128 and not fractional
    return {
        "BM": tile.m,
        "BN": tile.n,
        "GROUP": group_size,
        "FRACTIONAL": fractional,
        "HALF": half,
        "STAGES": tile.stages,
        "TILES": tile.tiles,
        "SLICES": tile.slices,
        "QUADS": quads,
        "UNIT": tile.unit_stages,
        "SCALED": not scales_sums,
    }
