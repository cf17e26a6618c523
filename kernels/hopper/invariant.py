"""Batch-invariant matrix product on Hopper, split-K, in Gluon: one order of summation for every M.

y [M, N] = x [M, K] @ w.T, w [N, K] packed; the decoder (`decoder.py`) defines the meaning of its bytes. If a
row's bits may depend on M, `stream_k.py` is faster. `invariant_config.py` chooses tiles and splits.

"Swap AB": the weight is wgmma's M operand, `acc[BN, BM] += w[BN, 64] . x[BM, 64]^T`, so that sixteen rows of
x cost one wgmma of N=16 and not a tile of 64 rows three quarters empty.

    producer warp   TMA: words, scales, activations --> a ring of stages in shared memory
    consumers       shared loads: a lane's words of a tile, decoded
                    register-operand wgmma, asynchronous; the next chunk is decoded meanwhile

A weight with few tiles is split along K, into the number of splits that suits a single row of x. Each split
writes its fp32 partial sums to scratch memory. The CTA that finishes last adds them in the order of K, so the
bits do not depend on which CTA is last. For more rows of x, one CTA computes all splits of a tile, one after
another, with the same bits (SEQUENTIAL).

With PDL (programmatic dependent launch), the producer loads weights before the kernel ahead has ended;
loads of activations and all stores wait until that kernel has ended.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..triton_imports import (
    TensorDescriptor,
    aggregate,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
    tma_store,
    triton,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .decoder import Decoder
from .operand import wgmma_operand
from .packed_operand import PackedOperand, x_layout
from .tile import HopperTile
from .tma_loads import Ring, ring_shape, stage_bytes
from .traits import Traits


@gluon.jit
def read_operand(words_smem, scale_smem, CHUNK: gl.constexpr, t):
    """Return chunk `CHUNK` of a stage as wgmma's A operand [BN, 16 * SLICES]."""
    tile: gl.constexpr = CHUNK * t.SLICES // 4
    words = t.DECODER.load_words(words_smem, tile, t)
    scales = t.DECODER.load_scales(scale_smem, tile, t)
    more_words = words
    more_scales = scales
    if t.SLICES == 8:
        more_words = t.DECODER.load_words(words_smem, tile + 1, t)
        if t.SCALE_COLUMNS < 128:
            more_scales = t.DECODER.load_scales(scale_smem, tile + 1, t)
    return wgmma_operand(words, scales, more_words, more_scales, CHUNK, t)


@aggregate
class Work:
    """A tile of y, and the stages `begin` to `end` of K in one of its splits.

    units, num_splits  SEQUENTIAL: the units of `SPLIT_UNIT` columns in K, and into how many splits
    """

    tile_m: gl.tensor
    tile_n: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    units: gl.tensor
    num_splits: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile_m, tile_n, begin, end, units, num_splits):
        self.tile_m = tile_m
        self.tile_n = tile_n
        self.begin = begin
        self.end = end
        self.units = units
        self.num_splits = num_splits


@gluon.jit
def load_stage(ring, work, slot, stage, pred, WEIGHTS: gl.constexpr, ACTIVATIONS: gl.constexpr, t):
    """Start loading stage number `stage` of K into a slot of the ring."""
    if WEIGHTS:
        count: gl.constexpr = stage_bytes(
            ring.words_desc.block_shape, ring.scale_desc.block_shape, ring.x_desc.block_shape
        )
        mbarrier.expect(ring.full.index(slot), count, pred=pred)
        ring.load_weights(slot, stage, work.tile_n, pred, t)
    if ACTIVATIONS:
        ring.load_activations(slot, stage, work.tile_m, pred, t)


@gluon.jit
def producer_partition(ring, empty, work, t):
    """Run the one warp that issues the TMA loads."""
    begin = work.begin
    end = work.end
    # The weights do not depend on the kernel before this one, so the first of them need not wait for its end;
    # the activations do.
    for slot in gl.static_range(t.STAGES):
        load_stage(ring, work, slot, begin + slot, begin + slot < end, True, False, t)
    gdc_wait()
    for slot in gl.static_range(t.STAGES):
        load_stage(ring, work, slot, begin + slot, begin + slot < end, False, True, t)
    slot = 0
    phase = 0
    for stage in range(begin + t.STAGES, end):
        mbarrier.wait(empty.index(slot), phase)
        load_stage(ring, work, slot, stage, True, True, True, t)
        wraps = slot + 1 == t.STAGES
        slot = gl.where(wraps, 0, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def consumer_partition(ring, empty, work, SEQUENTIAL: gl.constexpr, t):
    """Return the sums [BN, BM] over one split of K; with SEQUENTIAL over all splits, each summed separately.

    An iteration of the loop handles an even number of chunks, so that the operand in flight and the next
    operand have their own registers. One chunk is decoded while the wgmmas of the previous chunk run.
    """
    begin = work.begin
    end = work.end
    accumulator = gl.zeros([t.BN, t.BM], gl.float32, t.MMA)
    total = accumulator
    mbarrier.wait(ring.full.index(0), 0)
    weight = read_operand(ring.words.index(0), ring.scales.index(0), 0, t)
    before = weight
    slot = 0
    phase = 0
    for split in range(0, work.num_splits if SEQUENTIAL else 1):
        split_begin = begin
        split_end = end
        if SEQUENTIAL:
            split_begin = split * work.units // work.num_splits * (4 // t.K_TILES)
            split_end = (split + 1) * work.units // work.num_splits * (4 // t.K_TILES)
        for first in range(split_begin, split_end, t.ITER_STAGES):
            for i in gl.static_range(t.ITER_STAGES):
                stage = first + i
                wraps = slot + 1 == t.STAGES
                following = gl.where(wraps, 0, slot + 1)
                for chunk in gl.static_range(t.CHUNKS):
                    x_chunk = ring.x.index(slot).slice(chunk * 16 * t.SLICES, 16 * t.SLICES, dim=1)
                    accumulator = warpgroup_mma(weight, x_chunk.permute((1, 0)), accumulator, is_async=True)
                    # At most this chunk is in flight: the one before it is done.
                    accumulator, before = warpgroup_mma_wait(1, deps=[accumulator, before])
                    before = weight
                    if chunk == 0:
                        previous = gl.where(slot == 0, t.STAGES - 1, slot - 1)
                        mbarrier.arrive(empty.index(previous), count=1, pred=stage > begin)
                    if chunk + 1 < t.CHUNKS:
                        weight = read_operand(ring.words.index(slot), ring.scales.index(slot), chunk + 1, t)
                    else:
                        phase = gl.where(wraps, phase ^ 1, phase)
                        mbarrier.wait(ring.full.index(following), phase, pred=stage + 1 < end)
                        weight = read_operand(ring.words.index(following), ring.scales.index(following), 0, t)
                slot = following
        accumulator, before = warpgroup_mma_wait(0, deps=[accumulator, before])
        if SEQUENTIAL:
            total += accumulator
            accumulator = gl.zeros([t.BN, t.BM], gl.float32, t.MMA)
    if SEQUENTIAL:
        accumulator = total
    return (accumulator,)


@aggregate
class Output:
    """Store y [M, N]: the sums, multiplied by `factor` if there is one.

    With TMA_STORE, y is written through `staging` in shared memory by `y_desc`.
    """

    y: gl.tensor
    y_desc: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    M: gl.tensor
    N: gl.tensor
    factor: gl.tensor | gl.constexpr
    TMA_STORE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, y, y_desc, staging, m, n, factor, tma_store):
        self.y = y
        self.y_desc = y_desc
        self.staging = staging
        self.M = m
        self.N = n
        self.factor = gl.constexpr(None) if factor is None else factor
        self.TMA_STORE = gl.constexpr(tma_store)


@gluon.jit
def store_y(sums, output, first_row, first_column, t):
    """Store sums [BN, BM], rounded, to rows of y."""
    if output.factor is not None:
        sums = sums * gl.load(output.factor)
    sums = sums.to(t.DTYPE)
    if output.TMA_STORE:
        output.staging.permute((1, 0)).store(sums)
        fence_async_shared()
        thread_barrier()
        tma_store(output.y_desc, [first_row, first_column], output.staging)
        tma.store_wait(0)
    else:
        N = output.N
        column = first_column + gl.arange(0, t.BN, gl.SliceLayout(1, t.MMA))
        row = first_row + gl.arange(0, t.BM, gl.SliceLayout(0, t.MMA))
        inside = (row < output.M)[None, :] & (column < N)[:, None]
        gl.store(output.y + ((row.to(gl.int64) * N)[None, :] + column[:, None]), sums, mask=inside)


@gluon.constexpr_function
def reduce_unroll(rows):
    """Return how many partial sums are loaded together: as many as fit in registers."""
    return 8 if rows <= 16 else 4 if rows <= 64 else 1


@gluon.jit(
    do_not_specialize=["M", "N", "units", "tiles_m", "whole_tiles", "num_splits"],
    repr=lambda form: form.constants["DECODER"].name + "_invariant_kernel",
)
def invariant_kernel(
    x_desc, words_desc, scale_desc, y, y_desc, factor, partials, semaphores,
    M, N, units, tiles_m, whole_tiles, num_splits,
    TILE: gl.constexpr, DECODER: gl.constexpr, TMA_STORE: gl.constexpr, SEQUENTIAL: gl.constexpr,
):  # fmt: skip
    """The grid has a CTA for each of the first `whole_tiles` tiles, `num_splits` CTAs for each other tile."""
    t = Traits(TILE, DECODER, True)
    pid = gl.program_id(0)
    tile = pid
    split = 0
    splits = 1
    if pid >= whole_tiles:
        tile = whole_tiles + (pid - whole_tiles) // num_splits
        split = (pid - whole_tiles) % num_splits
        splits = num_splits
    tile_n = tile // tiles_m
    tile_m = tile % tiles_m
    # A split is a whole number of units of 256 columns whatever the stage, so it is the same for every M.
    begin = split * units // splits * (4 // t.K_TILES)
    end = (split + 1) * units // splits * (4 // t.K_TILES)
    work = Work(tile_m, tile_n, begin, end, units, num_splits)

    words_ring = gl.allocate_shared_memory(
        gl.int32, ring_shape(t.STAGES, words_desc.block_shape), words_desc.layout
    )
    scale_ring = gl.allocate_shared_memory(
        gl.int32, ring_shape(t.STAGES, scale_desc.block_shape), scale_desc.layout
    )
    x_ring = gl.allocate_shared_memory(t.DTYPE, [t.STAGES, t.BM, t.K_TILES * 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [t.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [t.STAGES, 1], mbarrier.MBarrierLayout())
    ring = Ring(x_desc, words_desc, scale_desc, words_ring, scale_ring, x_ring, full)
    for slot in gl.static_range(t.STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    gdc_launch_dependents()
    (sums,) = gl.warp_specialize([
        (consumer_partition, (ring, empty, work, SEQUENTIAL, t)),
        (producer_partition, (ring, empty, work, t)),
    ], [1], [24])  # fmt: skip

    gdc_wait()
    staging = gl.allocate_shared_memory(t.DTYPE, [t.BM, t.BN], x_desc.layout)
    output = Output(y, y_desc, staging, M, N, factor, TMA_STORE)
    if splits == 1:
        store_y(sums, output, tile_m * t.BM, tile_n * t.BN, t)
    else:
        own = tile - whole_tiles
        column = gl.arange(0, t.BN, gl.SliceLayout(1, t.MMA))
        row = gl.arange(0, t.BM, gl.SliceLayout(0, t.MMA))
        offset = column[:, None] * t.BM + row[None, :]
        scratch = partials + own.to(gl.int64) * splits * (t.BN * t.BM) + offset
        gl.store(scratch + split * (t.BN * t.BM), sums)
        thread_barrier()
        finished = gl.atomic_add(semaphores + own, 1, sem="acq_rel", scope="gpu")
        if finished == splits - 1:
            unroll: gl.constexpr = reduce_unroll(t.BM)
            total = gl.zeros([t.BN, t.BM], gl.float32, t.MMA)
            for first in range(0, splits, unroll):
                for i in gl.static_range(unroll):
                    wanted = first + i < splits
                    total += gl.load(
                        scratch + (first + i) * (t.BN * t.BM), mask=wanted, other=0.0, cache_modifier=".cg"
                    )
            gl.store(semaphores + own, 0)
            store_y(total, output, tile_m * t.BM, tile_n * t.BN, t)


SPLIT_UNIT = 256
"""Columns of K of which a split has a whole number."""


@dataclass(frozen=True)
class Tile(HopperTile):
    """`slices` is 2, 4 or 8.

    unit_us      microseconds of 256 columns of K where every CTA slot is taken (H200, measured)
    reduce_cost  what splitting K costs at all, in the same units of K (H200, measured)
    """

    unit_us: float
    reduce_cost: float = 0.0


def launch(
    x: Tensor, weight: PackedOperand, y: Tensor, tile: Tile, num_splits: int, sequential: bool
) -> None:
    """Write x [M, K] @ w.T into y [M, N], in one launch, with K in `num_splits` splits.

    sequential: whether one CTA sums all splits of a tile; else each split has its own CTA
    """
    m, n = y.shape
    tiles = tile.num_tiles(m, n)
    whole = tiles if num_splits == 1 or sequential else 0
    scratch = (tiles - whole) * num_splits * tile.n * tile.m
    partials = torch.empty(max(scratch, 1), dtype=torch.float32, device=x.device)
    x_desc, words_desc, scale_desc = weight.descriptors(x, tile)
    # A TMA store wants rows of y on 16 bytes.
    tma_store = tile.k_tiles == 1 and n % 8 == 0
    y_desc = TensorDescriptor.from_tensor(y, [tile.m, tile.n], x_layout()) if tma_store else x_desc
    invariant_kernel[(whole + (tiles - whole) * num_splits,)](
        x_desc, words_desc, scale_desc, y, y_desc, weight.factor, partials, weight.semaphores,
        m, n, triton.cdiv(weight.columns, SPLIT_UNIT), triton.cdiv(m, tile.m), whole, num_splits,
        **constants(tile, weight.decoder, tma_store, sequential),
        **tile.options(),
    )  # fmt: skip


def constants(tile: Tile, decoder: Decoder, tma_store: bool, sequential: bool = False) -> dict[str, object]:
    """The kernel's constexpr arguments."""
    return {"TILE": tile, "DECODER": decoder, "TMA_STORE": tma_store, "SEQUENTIAL": sequential}
