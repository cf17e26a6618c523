"""Warps that put a stage's activations in another order, for decoders whose lanes hold eight columns.

wgmma gives lane 4 r + t pair t of every four pairs of columns. A format that looks up eight columns at once
has pairs 4 t .. 4 t + 3 of 32 columns in that lane. The columns of both operands may be in any order, if the
order is the same. These warps therefore transpose the pairs of x:

    pair 4 t + q of 32 columns  -->  pair 4 q + t

The 16 pairs are four chunks of 16 bytes, which a thread moves with four loads and four stores. The reordering
warps work between the producer and the consumers: x arrives at separate mbarriers, and a stage is full when
the reordering warps have arrived as well. Words and scales are not reordered, nor is x for formats that are
packed in wgmma's own order.
"""

from ..triton_imports import gl, gluon
from .ptx import mbarrier_arrive, mbarrier_wait, ptx

REORDERING_WARPS = gl.constexpr(2)
THREADS = gl.constexpr(REORDERING_WARPS.value * 32)


@gluon.constexpr_function
def transpose_asm(first, rows):
    """first: the number of an item, a multiple of 64; the thread handles item `first + $address`"""
    half, row = first // rows, first % rows
    added, xored = half // 2 * rows * 128 + row * 128, half % 2 * 64
    lines = [
        ".reg .b32 a<4>, p<16>;",
        "mov.u32 a0, global_smem;", "add.u32 a0, a0, $address;", f"xor.b32 a0, a0, {xored};",
    ]  # fmt: skip
    lines += [f"xor.b32 a{i}, a0, {16 * i};" for i in (1, 2, 3)]
    for i in range(4):
        row = ",".join(f"p{4 * i + j}" for j in range(4))
        lines.append(f"ld.shared.v4.b32 {{{row}}}, [a{i}+{added}];")
    for i in range(4):
        column = ",".join(f"p{4 * j + i}" for j in range(4))
        lines.append(f"st.shared.v4.b32 [a{i}+{added}], {{{column}}};")
    return ptx("unused address", *lines, "mov.u32 $unused, 0;")


@gluon.jit
def transpose_pairs(address, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Transpose the pairs of item `FIRST`, whose four chunks lie from `address` on; the place of a chunk in a
    row is xored with the row's number.
    """
    gl.inline_asm_elementwise(
        transpose_asm(FIRST, ROWS), "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def publish():
    """Make this warp's writes visible to wgmma before its next mbarrier arrive."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [0],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def reordering_partition(work, t, smem):
    """An item is 32 columns of a row. Items go down the rows first, then to the right, 64 columns a panel."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [REORDERING_WARPS], [0])
    thread = gl.arange(0, THREADS, layout)
    row = thread % t.BM
    half = thread // t.BM
    address = smem.X + (half // 2) * (t.BM * 128) + row * 128 + (((half % 2) * 4) ^ (row % 8)) * 16
    slot = work.stages * 0
    phase = work.stages * 0
    for _stage in range(0, work.stages):
        mbarrier_wait(smem.X_FULL + slot * 8, phase)
        stage = address + slot * (t.BM * t.K_TILES * 128)
        for i in gl.static_range(t.BM * t.K_TILES * 2 // THREADS):
            transpose_pairs(stage, i * THREADS, t.BM)
        publish()
        mbarrier_arrive(smem.FULL + slot * 8, slot >= 0)
        wraps = slot + 1 == t.STAGES
        slot = gl.where(wraps, 0, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
