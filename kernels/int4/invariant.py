"""INT4 product on Hopper for batch-invariant serving, in Gluon: one order of summation for every M.

Where it may depend on M, `stream_k.py` is faster. `invariant_config.py` chooses tiles and parts.

Shapes: x [M, K], packed weight [N, K] in tiles of 64 rows and 64 columns (`swap_ab.py`), y [M, N].

The weight is the M operand ("swap AB"): `acc[BN, BM] += w[BN, 64] . x[BM, 64]^T`, so that sixteen requests
cost one wgmma of N=16 and not a tile of 64 rows three quarters empty.

    producer warp   TMA: words, zeros and scales, activations --> a ring of stages in shared memory
    the others      ld.shared.v4: a lane's four words of a tile, unpacked by `unpack.py`
                    wgmma from registers, asynchronous; the next chunk is unpacked meanwhile

A weight with few tiles is split along K, in as many parts as suit a single row of x. Each part leaves its
fp32 sums in a scratch buffer; the part that arrives last adds all of them in order of K, so the bits are the
same whoever is last. For more rows one CTA sums a tile's parts, one after the other, to these (`sequential`).

Programmatic dependent launch: the producer fetches weights before the kernel ahead has ended; activations,
and everything that is written, wait for its end.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tile import HopperTile
from .tma_loads import load_activations, load_weights, stage_bytes
from .unpack import wgmma_operand, x_layout, zero_and_scale


@gluon.constexpr_function
def words_register_layout(rows: int):
    """The words of a tile, [row / 16, r, t, v, u], among the warps: each thread the four of its lane."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]],
        lane_bases=[[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]],
        warp_bases=[[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]][: 2 if rows == 64 else 3],
        block_bases=[],
        shape=[rows // 16, 8, 4, 2, 2],
    )


PLAIN_5D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]))
PLAIN_3D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
PLAIN_1D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def read_words(words_smem, BN: gl.constexpr, tile: gl.constexpr):
    """The words of one tile of a stage; 128 rows only of stages of one tile."""
    spread: gl.constexpr = words_register_layout(BN)
    flat = words_smem._reinterpret(gl.int32, [words_smem.shape[0] * words_smem.shape[1] * 64], PLAIN_1D)
    words = flat.slice(tile * 512, BN * 8)._reinterpret(gl.int32, [BN // 16, 8, 4, 2, 2], PLAIN_5D)
    return words.load(spread)


@gluon.jit
def read_scales(
    scale_smem, BN: gl.constexpr, tile: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """For each group of a tile the rows' zeros and scales, each twice in a register."""
    flat = scale_smem._reinterpret(gl.int32, [scale_smem.shape[0] * BN], PLAIN_1D)
    scales = ()
    for group in gl.static_range(64 // GROUP if GROUP < 64 else 1):
        row = flat.slice(((tile * 64) // GROUP + group) * BN, BN)
        by_row = row._reinterpret(gl.int32, [BN // 16, 2, 8], PLAIN_3D).permute((0, 2, 1))
        scale_words = by_row.load(gl.SliceLayout(2, gl.SliceLayout(3, words_register_layout(BN))))
        first, second = zero_and_scale(scale_words, FRACTIONAL, HALF, True)
        first = gl.expand_dims(gl.expand_dims(first, 2), 3)
        second = gl.expand_dims(gl.expand_dims(second, 2), 3)
        scales = scales + (first, second)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@gluon.jit
def read_operand(
    words_smem, scale_smem, BN: gl.constexpr, CHUNK: gl.constexpr, SLICES: gl.constexpr,
    GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Chunk `CHUNK` of a stage, `SLICES` slices of 16 columns, as wgmma's operand [BN, 16 * SLICES]."""
    tile: gl.constexpr = CHUNK * SLICES // 4
    words = read_words(words_smem, BN, tile)
    scales = read_scales(scale_smem, BN, tile, GROUP, FRACTIONAL, HALF)
    more_words = words
    more_scales = scales
    if SLICES == 8:
        # Two tiles; in groups of 128 they share their scales.
        more_words = read_words(words_smem, BN, tile + 1)
        if GROUP < 128:
            more_scales = read_scales(scale_smem, BN, tile + 1, GROUP, FRACTIONAL, HALF)
    return wgmma_operand(
        words, scales, more_words, more_scales, CHUNK, BN, SLICES, GROUP, FRACTIONAL, HALF, True, MMA
    )  # fmt: skip


@gluon.jit
def load_stage(
    words_desc, scale_desc, x_desc, ring, slot, stage, tile_m, tile_n, pred,
    WEIGHTS: gl.constexpr, ACTIVATIONS: gl.constexpr, K_TILES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Start copying stage number `stage` of K into a slot of the ring; past the end of K zeros arrive."""
    words_ring, scale_ring, x_ring, ready, _free = ring
    bar = ready.index(slot)
    if WEIGHTS:
        count: gl.constexpr = stage_bytes(words_ring.shape, scale_ring.shape, x_ring.shape, K_TILES)
        mbarrier.expect(bar, count, pred=pred)
        load_weights(
            words_desc, scale_desc, words_ring, scale_ring, slot, bar, stage, tile_n, pred, K_TILES, GROUP
        )  # fmt: skip
    if ACTIVATIONS:
        load_activations(x_desc, x_ring, slot, bar, stage, tile_m, pred, K_TILES)


@gluon.jit
def produce(
    x_desc, words_desc, scale_desc, ring, tile_m, tile_n, begin, end,
    STAGES: gl.constexpr, K_TILES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The one warp that starts the copies."""
    _words_ring, _meta_ring, _x_ring, _ready, free = ring
    # The weights do not depend on the kernel before this one, so the first of them need not wait for its end;
    # the activations do.
    for slot in gl.static_range(STAGES):
        load_stage(
            words_desc, scale_desc, x_desc, ring, slot, begin + slot, tile_m, tile_n, begin + slot < end,
            True, False, K_TILES, GROUP,
        )  # fmt: skip
    gdc_wait()
    for slot in gl.static_range(STAGES):
        load_stage(
            words_desc, scale_desc, x_desc, ring, slot, begin + slot, tile_m, tile_n, begin + slot < end,
            False, True, K_TILES, GROUP,
        )  # fmt: skip
    slot = 0
    phase = 0
    for stage in range(begin + STAGES, end):
        mbarrier.wait(free.index(slot), phase)
        load_stage(
            words_desc,
            scale_desc,
            x_desc,
            ring,
            slot,
            stage,
            tile_m,
            tile_n,
            True,
            True,
            True,
            K_TILES,
            GROUP,
        )
        wraps = slot + 1 == STAGES
        slot = gl.where(wraps, 0, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def multiply(
    ring, begin, end, units, split, BN: gl.constexpr, BM: gl.constexpr, GROUP: gl.constexpr,
    FRACTIONAL: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, K_TILES: gl.constexpr,
    SLICES: gl.constexpr, SEQUENTIAL: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The sums [BN, BM] over one part of K; with `SEQUENTIAL` over all `split` parts, each summed by itself.

    A turn of the loop takes an even number of chunks, so that the operand in flight and the one being made
    keep registers of their own; unpacking one chunk runs beside the product of the one before it.
    """
    words_ring, scale_ring, x_ring, ready, free = ring
    chunks: gl.constexpr = K_TILES * 4 // SLICES
    step: gl.constexpr = 2 if chunks == 1 else 1
    accumulator = gl.zeros([BN, BM], gl.float32, MMA)
    total = accumulator
    mbarrier.wait(ready.index(0), 0)
    weight = read_operand(
        words_ring.index(0), scale_ring.index(0), BN, 0, SLICES, GROUP, FRACTIONAL, HALF, MMA
    )
    before = weight
    slot = 0
    phase = 0
    for part in range(0, split if SEQUENTIAL else 1):
        part_begin = begin
        part_end = end
        if SEQUENTIAL:
            part_begin = part * units // split * (4 // K_TILES)
            part_end = (part + 1) * units // split * (4 // K_TILES)
        for first in range(part_begin, part_end, step):
            for i in gl.static_range(step):
                stage = first + i
                wraps = slot + 1 == STAGES
                following = gl.where(wraps, 0, slot + 1)
                for chunk in gl.static_range(chunks):
                    x_chunk = (
                        x_ring.index(slot).slice(chunk * 16 * SLICES, 16 * SLICES, dim=1).permute((1, 0))
                    )
                    accumulator = warpgroup_mma(weight, x_chunk, accumulator, is_async=True)
                    # At most this product is in flight: the one before it is done.
                    accumulator, before = warpgroup_mma_wait(1, deps=[accumulator, before])
                    before = weight
                    if chunk == 0:
                        previous = gl.where(slot == 0, STAGES - 1, slot - 1)
                        mbarrier.arrive(free.index(previous), count=1, pred=stage > begin)
                    if chunk + 1 < chunks:
                        weight = read_operand(
                            words_ring.index(slot), scale_ring.index(slot), BN, chunk + 1, SLICES,
                            GROUP, FRACTIONAL, HALF, MMA,
                        )  # fmt: skip
                    else:
                        phase = gl.where(wraps, phase ^ 1, phase)
                        mbarrier.wait(ready.index(following), phase, pred=stage + 1 < end)
                        weight = read_operand(
                            words_ring.index(following), scale_ring.index(following), BN, 0, SLICES,
                            GROUP, FRACTIONAL, HALF, MMA,
                        )  # fmt: skip
                slot = following
        accumulator, before = warpgroup_mma_wait(0, deps=[accumulator, before])
        if SEQUENTIAL:
            total += accumulator
            accumulator = gl.zeros([BN, BM], gl.float32, MMA)
    if SEQUENTIAL:
        accumulator = total
    return (accumulator,)


@gluon.jit
def write(
    y, y_desc, staging, sums, M, N, first_row, first_column, BN: gl.constexpr, BM: gl.constexpr,
    MMA: gl.constexpr, TMA_STORE: gl.constexpr,
):  # fmt: skip
    """Sums [BN, BM] to rows of y; in bulk through `staging`."""
    if TMA_STORE:
        staging.permute((1, 0)).store(sums)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(y_desc, [first_row, first_column], staging)
        tma.store_wait(0)
    else:
        column = first_column + gl.arange(0, BN, gl.SliceLayout(1, MMA))
        row = first_row + gl.arange(0, BM, gl.SliceLayout(0, MMA))
        inside = (row < M)[None, :] & (column < N)[:, None]
        gl.store(y + ((row.to(gl.int64) * N)[None, :] + column[:, None]), sums, mask=inside)


@gluon.jit(do_not_specialize=["M", "N", "units", "tiles_m", "whole_tiles", "split"])
def int4_invariant_kernel(
    x_desc,
    words_desc,
    scale_desc,
    y,
    y_desc,
    partials,
    semaphores,
    M,
    N,
    units,
    tiles_m,
    whole_tiles,
    split,
    BM: gl.constexpr,
    BN: gl.constexpr,
    GROUP: gl.constexpr,
    FRACTIONAL: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    K_TILES: gl.constexpr,
    SLICES: gl.constexpr,
    REDUCE_UNROLL: gl.constexpr,
    TMA_STORE: gl.constexpr,
    SEQUENTIAL: gl.constexpr,
):
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BN // 16, 1], [16, BM, 16])
    # Which tile of y, and which part of its K.
    pid = gl.program_id(0)
    tile = pid
    part = 0
    parts = 1
    if pid >= whole_tiles:
        tile = whole_tiles + (pid - whole_tiles) // split
        part = (pid - whole_tiles) % split
        parts = split
    tile_n = tile // tiles_m
    tile_m = tile % tiles_m
    # A part is a whole number of units of 256 columns whatever the stage, so that it is the same for every M.
    begin = part * units // parts * (4 // K_TILES)
    end = (part + 1) * units // parts * (4 // K_TILES)

    scale_rows: gl.constexpr = scale_desc.block_shape[0]
    words_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 64, K_TILES * 8, 64], words_desc.layout)
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES, scale_rows, BN], scale_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, BM, K_TILES * 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = (words_ring, scale_ring, x_ring, ready, free)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    gdc_launch_dependents()
    (sums,) = gl.warp_specialize([
        (multiply, (ring, begin, end, units, split, BN, BM, GROUP, FRACTIONAL, HALF, STAGES, K_TILES, SLICES,
                    SEQUENTIAL, mma)),
        (produce, (x_desc, words_desc, scale_desc, ring, tile_m, tile_n, begin, end, STAGES, K_TILES, GROUP)),
    ], [1], [24])  # fmt: skip

    gdc_wait()
    staging = x_ring.index(0) if BN == 64 else x_ring._reinterpret(dtype, [BM, BN], x_ring.layout)
    if parts == 1:
        write(y, y_desc, staging, sums.to(dtype), M, N, tile_m * BM, tile_n * BN, BN, BM, mma, TMA_STORE)
    else:
        own = tile - whole_tiles
        column = gl.arange(0, BN, gl.SliceLayout(1, mma))
        row = gl.arange(0, BM, gl.SliceLayout(0, mma))
        scratch = partials + own.to(gl.int64) * parts * (BN * BM) + (column[:, None] * BM + row[None, :])
        gl.store(scratch + part * (BN * BM), sums)
        gl.thread_barrier()
        arrived = gl.atomic_add(semaphores + own, 1, sem="acq_rel", scope="gpu")
        if arrived == parts - 1:
            total = gl.zeros([BN, BM], gl.float32, mma)
            for first in range(0, parts, REDUCE_UNROLL):
                for i in gl.static_range(REDUCE_UNROLL):
                    wanted = first + i < parts
                    total += gl.load(
                        scratch + (first + i) * (BN * BM), mask=wanted, other=0.0, cache_modifier=".cg"
                    )
            gl.store(semaphores + own, 0)
            write(y, y_desc, staging, total.to(dtype), M, N, tile_m * BM, tile_n * BN, BN, BM, mma, TMA_STORE)


UNIT = 256
"""Columns of K of which a part has a whole number."""


@dataclass(frozen=True)
class Tile(HopperTile):
    """Slices unpacked together: 2, 4 or 8.

    unit_us  measured on an H200: microseconds of 256 columns of K where every CTA slot is taken
    reduce_cost  measured: what splitting K costs at all, in the same units of K
    """

    unit_us: float
    reduce_cost: float = 0.0


def launch(
    x: Tensor,
    words: Tensor,
    scale_words: Tensor,
    semaphores: Tensor,
    y: Tensor,
    group_size: int,
    fractional: bool,
    tile: Tile,
    parts: int,
    sequential: bool,
) -> None:
    """One launch: every tile in `parts` parts of K; with `sequential` by one CTA, else each by its own."""
    m, n = y.shape
    tiles = tile.num_tiles(m, n)
    whole = tiles if parts == 1 or sequential else 0
    scratch = (tiles - whole) * parts * tile.n * tile.m
    partials = torch.empty(max(scratch, 1), dtype=torch.float32, device=x.device)
    x_desc, words_desc, scale_desc = tile.descriptors(x, words, scale_words, group_size)
    # A bulk store wants rows of y on 16 bytes.
    bulk = tile.k_tiles == 1 and n % 8 == 0
    y_desc = TensorDescriptor.from_tensor(y, [tile.m, tile.n], x_layout()) if bulk else x_desc
    int4_invariant_kernel[(whole + (tiles - whole) * parts,)](
        x_desc, words_desc, scale_desc, y, y_desc, partials, semaphores,
        m, n, triton.cdiv(x.shape[1], UNIT), triton.cdiv(m, tile.m), whole, parts,
        **constants(tile, group_size, fractional, x.dtype == torch.float16, bulk, sequential),
        **tile.options(),
    )  # fmt: skip


def constants(
    tile: Tile, group_size: int, fractional: bool, half: bool, bulk: bool, sequential: bool = False
) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return tile.constants(group_size, fractional, half) | {
        "REDUCE_UNROLL": 8 if tile.m <= 16 else 4 if tile.m <= 64 else 1,
        "TMA_STORE": bulk,
        "SEQUENTIAL": sequential,
    }
