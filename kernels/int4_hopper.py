"""The INT4 product on Hopper, in Gluon: weight fragments in registers, wgmma asynchronous, split K.

Reads the bytes of `int4_packing.py`; the portable kernel on the same bytes, and the reference, are in
`int4_swap_ab.py`. Not for chips without wgmma.

Shapes: x [M, K], packed weight [N, K] in tiles of 64 rows and 128 columns, y [M, N].

The weight is the M operand ("swap AB"): `acc[BN, BM] += W[BN, 128] . x[BM, 128]^T`, so that sixteen requests
cost one wgmma of N=16 and not a tile of 64 rows three quarters empty.

One step is one block of 128 columns:

    global --cp.async--> shared ring --ld.shared.v4--> 8 words --lop3--> 64 bf16 of 128+q, in wgmma's own
    fragment order, so no value ever changes lanes
    128+q --sub (128+z), exact--> q-z --wgmma--> block product --fma scale--> accumulator      scale on "sums"
    128+q --sub (128+z), exact--> q-z --mul scale--> weight --wgmma--> accumulator             scale on "weights"
    128+q --sub 136, exact-----> q-8 --fma scale, (8-z)*scale--> weight --wgmma--> accumulator fractional zero

The next block is unpacked while the matrix units work on this one. Instructions a weight: 2.0 with the scale
on the sums, 2.6 on the weights, 3.1 with a fractional zero; HBM at 4.3 TB/s leaves room for 3.7.

Few tiles: the tiles that do not fill a whole wave of the chip are split along K. Each part leaves its fp32
sums in a scratch buffer; the part that arrives last adds all of them in order of K, so the same bits come out
whoever is last.
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

BLOCK_K = gl.constexpr(128)
TILE_WORDS = gl.constexpr(1024)


def x_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def words_shared_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


def meta_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.constexpr_function
def unpack_asm(first_slice: int, slices: int, group_size: int, fractional: bool, half: bool) -> str:
    """PTX that turns a pair of packed words into the fragment registers of a few slices.

    Operands: the slices; the word pair; then for each group of the block a pair of registers holding its zero
    (as 128+z twice) and a pair holding its scale twice, with a fractional zero the scale and (8-z)*scale.
    """
    kind = "f16x2" if half else "bf16x2"
    magic = "0x64006400" if half else "0x43004300"
    centre = "0x64086408" if half else "0x43084308"
    lines = [".reg .b32 t;", ".reg .b32 c;", f"mov.b32 c, {centre};"]
    for i in range(slices):
        j = first_slice + i
        source = f"${slices + j // 4}"
        group = (j * 16) // group_size
        first, second = (f"${slices + 2 + 4 * group + operand}" for operand in (0, 2))
        if j % 4:
            lines.append(f"shr.u32 t, {source}, {4 * (j % 4)};")
            source = "t"
        lines.append(f"lop3.b32 ${i}, {source}, 0x000F000F, {magic}, 0xEA;")
        if fractional:
            lines.append(f"sub.rn.{kind} ${i}, ${i}, c;")
            lines.append(f"fma.rn.{kind} ${i}, ${i}, {first}, {second};")
        else:
            lines.append(f"sub.rn.{kind} ${i}, ${i}, {first};")
            lines.append(f"mul.rn.{kind} ${i}, ${i}, {second};")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def unpack_constraints(slices: int, groups: int) -> str:
    return ",".join(["=&r"] * slices + ["r"] * (2 + 4 * groups))


@gluon.constexpr_function
def slice_types(slices: int, half: bool) -> tuple:
    return (gl.float16 if half else gl.bfloat16,) * slices


@gluon.constexpr_function
def words_layout(block_n: int, num_warps: int):
    """Rows of four words, a 64-row tile being 256 of them: a thread holds two rows of each of its tiles."""
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    registers = [[0, 1], [0, 2], [32, 0]]
    warps = [[64, 0], [128, 0]]
    rows = block_n * 4
    step = 256
    if num_warps == 8:
        warps.append([256, 0])
        step = 512
    while step < rows:
        registers.append([step, 0])
        step *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, 4])


@gluon.jit
def pair_of(value, HALF: gl.constexpr):
    """fp32 [BN] to int32 [BN] holding the value twice in 16 bits."""
    if HALF:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def read_block(
    words_smem, meta_smem, BN: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """One block from shared memory: its words as operand pairs, and its zeros and scales, each twice a register."""
    operand: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    groups: gl.constexpr = 128 // GROUP
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = words_smem._reinterpret(gl.int32, [BN * 4, 4], flat).load(words_layout(BN, gl.num_warps()))
    # [tile*warp, v, r, t, u, s] -> row (tile*warp, u, r), column (v, t, s)
    words = gl.permute(gl.reshape(words, [BN // 16, 2, 8, 4, 2, 2]), [0, 4, 2, 1, 3, 5])
    inputs = (gl.convert_layout(gl.reshape(words, [BN, 16]), operand, assert_trivial=True),)
    row_words = meta_smem._reinterpret(gl.int32, [groups * BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for group in gl.static_range(groups):
        meta = row_words.slice(group * BN, BN).load(gl.SliceLayout(1, operand))
        if FRACTIONAL:
            first = (meta & -65536) | ((meta >> 16) & 0xFFFF)
            second = (meta << 16) | (meta & 0xFFFF)
        else:
            first = (meta & 0xF) * 0x00010001 | (0x64006400 if HALF else 0x43004300)
            second = pair_of((meta & -16).to(gl.float32, bitcast=True), HALF)
        inputs = inputs + (gl.expand_dims(first, 1), gl.expand_dims(second, 1))
    return inputs


@gluon.jit
def unpack(
    inputs, CHUNK: gl.constexpr, SLICES: gl.constexpr,
    BN: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """One chunk of a block, `SLICES` slices of 16 columns, to the wgmma operand [BN, 16 * SLICES]."""
    asm: gl.constexpr = unpack_asm(CHUNK * SLICES, SLICES, GROUP, FRACTIONAL, HALF)
    constraints: gl.constexpr = unpack_constraints(SLICES, 128 // GROUP)
    types: gl.constexpr = slice_types(SLICES, HALF)
    part = gl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=False, pack=2)
    # Joining puts a bit of the slice's number last; the permutation makes them the high bits of the column.
    if SLICES == 2:
        chunk = gl.permute(gl.join(part[0], part[1]), [0, 2, 1])
    elif SLICES == 4:
        chunk = gl.join(gl.join(part[0], part[2]), gl.join(part[1], part[3]))
        chunk = gl.permute(chunk, [0, 2, 3, 1])
    else:
        low = gl.join(gl.join(part[0], part[2]), gl.join(part[1], part[3]))
        high = gl.join(gl.join(part[4], part[6]), gl.join(part[5], part[7]))
        chunk = gl.permute(gl.join(low, high), [0, 4, 2, 3, 1])
    operand: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    return gl.convert_layout(gl.reshape(chunk, [BN, 16 * SLICES]), operand, assert_trivial=True)


@gluon.jit
def start_copies(
    words_desc, meta_desc, x_desc, ring, stage, first, end, beyond, tile_m, tile_n, pred,
    WEIGHTS: gl.constexpr, ACTIVATIONS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Start copying the `BLOCKS` blocks from `first` on into a stage; a block past the end arrives as zeros."""
    words_ring, meta_ring, x_ring, ready, free = ring
    bar = ready.index(stage)
    if WEIGHTS:
        mbarrier.expect(bar, BLOCKS * (BN * 64 + GROUPS * BN * 4 + BM * 256), pred=pred)
    for i in gl.static_range(BLOCKS):
        block = gl.where(first + i < end, first + i, beyond)
        slot = stage * BLOCKS + i
        if WEIGHTS:
            words_from = [tile_n * (BN // 64), block * 16, 0]
            tma.async_copy_global_to_shared(words_desc, words_from, bar, words_ring.index(slot), pred=pred)
            meta_from = [block * GROUPS, tile_n * BN]
            tma.async_copy_global_to_shared(meta_desc, meta_from, bar, meta_ring.index(slot), pred=pred)
        if ACTIVATIONS:
            x_from = [tile_m * BM, block * 128]
            tma.async_copy_global_to_shared(x_desc, x_from, bar, x_ring.index(slot), pred=pred)


@gluon.jit
def produce(
    x_desc, words_desc, meta_desc, ring, tile_m, tile_n, begin, end, k_blocks,
    BM: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The one warp that starts the copies."""
    words_ring, meta_ring, x_ring, ready, free = ring
    # The weights do not depend on the kernel before this one, so the first of them need not wait for its end;
    # the activations do.
    for stage in gl.static_range(STAGES):
        first = begin + stage * BLOCKS
        start_copies(
            words_desc, meta_desc, x_desc, ring, stage, first, end, k_blocks, tile_m, tile_n, first < end,
            True, False, BM, BN, GROUPS, BLOCKS,
        )  # fmt: skip
    gdc_wait()
    for stage in gl.static_range(STAGES):
        first = begin + stage * BLOCKS
        start_copies(
            words_desc, meta_desc, x_desc, ring, stage, first, end, k_blocks, tile_m, tile_n, first < end,
            False, True, BM, BN, GROUPS, BLOCKS,
        )  # fmt: skip
    stage = 0
    phase = 0
    for first in range(begin + STAGES * BLOCKS, end, BLOCKS):
        mbarrier.wait(free.index(stage), phase)
        start_copies(
            words_desc, meta_desc, x_desc, ring, stage, first, end, k_blocks, tile_m, tile_n, True,
            True, True, BM, BN, GROUPS, BLOCKS,
        )  # fmt: skip
        wraps = stage + 1 == STAGES
        stage = gl.where(wraps, 0, stage + 1)
        phase = gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def consume(
    ring, begin, end,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, SLICES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The warps that unpack weights and multiply; the sums [BN, BM] of this part of K.

    A step takes an even number of chunks, so that the operand in flight and the one being made keep registers
    of their own; unpacking one chunk runs beside the product of the one before it.
    """
    words_ring, meta_ring, x_ring, ready, free = ring
    chunks: gl.constexpr = 8 // SLICES
    accumulator = gl.zeros([BN, BM], gl.float32, MMA)
    mbarrier.wait(ready.index(0), 0)
    inputs = read_block(words_ring.index(0), meta_ring.index(0), BN, GROUP, FRACTIONAL, HALF, MMA)
    weight = unpack(inputs, 0, SLICES, BN, GROUP, FRACTIONAL, HALF, MMA)
    before = weight
    stage = 0
    phase = 0
    for first in range(begin, end, BLOCKS):
        wraps = stage + 1 == STAGES
        following = gl.where(wraps, 0, stage + 1)
        for i in gl.static_range(BLOCKS):
            x_tile = x_ring.index(stage * BLOCKS + i)
            for chunk in gl.static_range(chunks):
                x_chunk = x_tile.slice(chunk * 16 * SLICES, 16 * SLICES, dim=1).permute((1, 0))
                accumulator = warpgroup_mma(weight, x_chunk, accumulator, is_async=True)
                # At most this product is in flight: the one before it is done.
                accumulator, before = warpgroup_mma_wait(1, deps=[accumulator, before])
                before = weight
                if i == 0 and chunk == 0:
                    previous = gl.where(stage == 0, STAGES - 1, stage - 1)
                    mbarrier.arrive(free.index(previous), count=1, pred=first > begin)
                if chunk + 1 < chunks:
                    weight = unpack(inputs, chunk + 1, SLICES, BN, GROUP, FRACTIONAL, HALF, MMA)
                else:
                    if i + 1 < BLOCKS:
                        slot = stage * BLOCKS + (i + 1)
                    else:
                        slot = following * BLOCKS
                        phase = gl.where(wraps, phase ^ 1, phase)
                        mbarrier.wait(ready.index(following), phase, pred=first + BLOCKS < end)
                    inputs = read_block(
                        words_ring.index(slot), meta_ring.index(slot), BN, GROUP, FRACTIONAL, HALF, MMA
                    )
                    weight = unpack(inputs, 0, SLICES, BN, GROUP, FRACTIONAL, HALF, MMA)
        stage = following
    accumulator, before = warpgroup_mma_wait(0, deps=[accumulator, before])
    return (accumulator,)


@gluon.jit
def store(y, sums, first_row, first_column, M, N, BM: gl.constexpr, BN: gl.constexpr):
    """Sums [BN, BM] to rows of y [M, N], eight neighbours along N a thread."""
    spread: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    sums = gl.convert_layout(sums, spread)
    column = first_column + gl.arange(0, BN, gl.SliceLayout(1, spread))
    row = first_row + gl.arange(0, BM, gl.SliceLayout(0, spread))
    inside = (row < M)[None, :] & (column < N)[:, None]
    gl.store(y + (row.to(gl.int64) * N)[None, :] + column[:, None], sums, mask=inside)


@gluon.jit(do_not_specialize=["M", "N", "k_blocks", "tiles_m", "whole_tiles", "split"])
def int4_hopper_kernel(
    x_desc,
    words_desc,
    meta_desc,
    y,
    partials,
    arrivals,
    M,
    N,
    k_blocks,
    tiles_m,
    whole_tiles,
    split,
    BM: gl.constexpr,
    BN: gl.constexpr,
    GROUP: gl.constexpr,
    FRACTIONAL: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    SLICES: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    num_warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    groups: gl.constexpr = 128 // GROUP
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])

    # Which tile, and which part of its K.
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
    begin = part * k_blocks // parts
    end = (part + 1) * k_blocks // parts

    words_ring = gl.allocate_shared_memory(gl.int32, [STAGES * BLOCKS, BN // 64, 16, 64], words_desc.layout)
    meta_ring = gl.allocate_shared_memory(gl.int32, [STAGES * BLOCKS, groups, BN], meta_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES * BLOCKS, BM, 128], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = (words_ring, meta_ring, x_ring, ready, free)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    gdc_launch_dependents()
    (accumulator,) = gl.warp_specialize(
        [
            (consume, (ring, begin, end, BM, BN, GROUP, FRACTIONAL, HALF, STAGES, BLOCKS, SLICES, mma)),
            (
                produce,
                (
                    x_desc, words_desc, meta_desc, ring, tile_m, tile_n, begin, end, k_blocks,
                    BM, BN, groups, STAGES, BLOCKS,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip

    gdc_wait()
    if parts == 1:
        store(y, accumulator.to(dtype), tile_m * BM, tile_n * BN, M, N, BM, BN)
    else:
        split_tile = tile - whole_tiles
        slot_row = gl.arange(0, BN, gl.SliceLayout(1, mma))
        slot_column = gl.arange(0, BM, gl.SliceLayout(0, mma))
        slot = partials + split_tile * split * (BN * BM) + (slot_row[:, None] * BM + slot_column[None, :])
        gl.store(slot + part * (BN * BM), accumulator)
        gl.thread_barrier()
        arrived = gl.atomic_add(arrivals + split_tile, 1, sem="acq_rel", scope="gpu")
        if arrived == split - 1:
            total = gl.zeros([BN, BM], gl.float32, mma)
            for first in range(0, split, TOGETHER):
                for i in gl.static_range(TOGETHER):
                    inside = first + i < split
                    total += gl.load(
                        slot + (first + i) * (BN * BM), mask=inside, other=0.0, cache_modifier=".cg"
                    )
            store(y, total.to(dtype), tile_m * BM, tile_n * BN, M, N, BM, BN)
            gl.store(arrivals + split_tile, 0)


@dataclass(frozen=True)
class Tile:
    """One compiled form of the kernel: a tile of the result, and how many of its CTAs one multiprocessor holds."""

    m: int
    n: int
    warps: int
    stages: int
    registers: int
    resident: int
    blocks: int = 2
    slices: int = 8


# By the number of rows of x. A bucket and not a shape: nothing compiles for a new M.
BUCKETS = (
    Tile(m=8, n=64, warps=4, stages=4, registers=80, resident=3, slices=4),
    Tile(m=16, n=64, warps=4, stages=4, registers=80, resident=3, slices=4),
    Tile(m=32, n=64, warps=4, stages=3, registers=80, resident=3, slices=4),
    Tile(m=64, n=64, warps=4, stages=5, registers=128, resident=2, blocks=1, slices=4),
    Tile(m=128, n=64, warps=4, stages=5, registers=168, resident=1, blocks=1, slices=2),
    Tile(m=256, n=64, warps=4, stages=3, registers=168, resident=1, blocks=1, slices=2),
)
MULTIPROCESSORS = 132
# Counters of the tiles whose K is split.
ARRIVALS = 1024


def tile_for(m: int) -> Tile:
    return next((tile for tile in BUCKETS if m <= tile.m), BUCKETS[-1])


def split_of(tiles: int, k_blocks: int, slots: int) -> tuple[int, int]:
    """(tiles taken whole, parts of K for each of the rest): whole waves of the chip first, then the rest split.

    The cost of a split is in blocks of K: three to start a part, one for each part to be added up.
    """
    whole = tiles // slots * slots
    rest = tiles - whole
    if rest == 0:
        return tiles, 1

    def cost(parts: int) -> float:
        blocks = -(-k_blocks // parts)
        waves = -(-rest * parts // slots)
        return waves * (blocks + blocks % 2 + 3) + (parts if parts > 1 else 0)

    parts = min(range(1, min(16, k_blocks // 2) + 1), key=cost, default=1)
    return (tiles, 1) if parts == 1 else (whole, parts)


def invariant_parts(n: int, k_blocks: int) -> int:
    """Parts of K by the shape of the weight alone: the one order of summation of batch-invariant serving."""
    smallest = BUCKETS[0]
    whole, parts = split_of(triton.cdiv(n, smallest.n), k_blocks, MULTIPROCESSORS * smallest.resident)
    return 1 if whole else parts


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
    """y [M, N] = x [M, K] @ w.T; x bf16 or fp16, contiguous, on 16 bytes. `arrivals` is zero before and after."""
    y = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    tile = tile_for(x.shape[0])
    k_blocks = words.shape[1]
    tiles_n = triton.cdiv(n, tile.n)
    if not batch_invariant:
        split = split_of(triton.cdiv(x.shape[0], tile.m) * tiles_n, k_blocks, MULTIPROCESSORS * tile.resident)
        launch(x, words, meta, arrivals, y, group_size, fractional, tile, *split)
        return y
    parts = invariant_parts(n, k_blocks)
    rows = max(1, ARRIVALS // tiles_n) * tile.m
    for first in range(0, x.shape[0], rows):
        part = slice(first, first + rows)
        launch(x[part], words, meta, arrivals, y[part], group_size, fractional, tile, 0, parts)
    return y


def launch(
    x: Tensor,
    words: Tensor,
    meta: Tensor,
    arrivals: Tensor,
    y: Tensor,
    group_size: int,
    fractional: bool,
    tile: Tile,
    whole: int,
    parts: int,
) -> None:
    """One launch: the first `whole` tiles in one go each, the others in `parts` parts of K."""
    m, n = y.shape
    tiles_n, k_blocks, _ = words.shape
    tiles_m = triton.cdiv(m, tile.m)
    tiles = tiles_m * triton.cdiv(n, tile.n)
    if parts == 1:
        whole = tiles
    scratch = (tiles - whole) * parts * tile.n * tile.m
    partials = torch.empty(max(scratch, 1), dtype=torch.float32, device=x.device)
    groups = 128 // min(group_size, 128)
    word_tiles = words.view(tiles_n, k_blocks * 16, 64)
    int4_hopper_kernel[(whole + (tiles - whole) * parts,)](
        TensorDescriptor.from_tensor(x, [tile.m, 128], x_layout()),
        TensorDescriptor.from_tensor(word_tiles, [tile.n // 64, 16, 64], words_shared_layout()),
        TensorDescriptor.from_tensor(meta, [groups, tile.n], meta_layout()),
        y,
        partials,
        arrivals,
        m,
        n,
        k_blocks,
        tiles_m,
        whole,
        parts,
        BM=tile.m,
        BN=tile.n,
        GROUP=min(group_size, 128),
        FRACTIONAL=fractional,
        HALF=x.dtype == torch.float16,
        STAGES=tile.stages,
        BLOCKS=tile.blocks,
        SLICES=tile.slices,
        TOGETHER=8 if tile.m <= 16 else 4 if tile.m <= 64 else 1,
        num_warps=tile.warps,
        maxnreg=tile.registers,
        launch_pdl=True,
    )
