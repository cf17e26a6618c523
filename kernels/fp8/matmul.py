"""Matrix product in E4M3 or INT8 with scales beside it: y [M, N] = (x * x_scale) @ (w * w_scale).T; Triton.

    x         [M, K]   float8_e4m3fn or int8, rows contiguous       x_scale  fp32 [G, M]
    weight    [N, K]   x's dtype, rows contiguous                   w_scale  fp32 [G, N]
    y         [M, N]   bf16 or fp16

G, the number of scales of a row, is 1, or K/128 if a row has a scale for every 128 columns. "Swap AB": the
weight is the first operand of the matrix instruction, so that few rows of x cost few columns.

Hopper sums products of E4M3 with 14 bits. Sums of 128 columns are therefore added to earlier sums in fp32 (in
two levels, as DeepGEMM does). If a row has several scales, each sum is multiplied by its scale first. Sums of
INT8 are exact in int32, and rows have one scale.

Splits of K follow from the weight's shape alone. The CTA that ends last adds the splits in the order of K;
with many rows one CTA takes all splits in that order. M may therefore decide the tile, but not the bits of a
row.

With few rows the kernel reads N K bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability
from ..invariant_matmul import MAX_SPLIT_ROWS, SPLIT_UNIT, Tile
from ..split_k import ends_last, partials_of, sum_of_splits
from ..triton_imports import tl, triton
from .tiles import GROUP, splits_of, tile_for

UNIT = tl.constexpr(SPLIT_UNIT)


class Form(NamedTuple):
    """Compile-time parameters of the kernel.

    split_k: whether K is split
    sequential: whether one CTA takes all splits
    even_k: whether K is a whole number of steps of `bk` columns
    blocks:     a row has a scale for every 128 columns
    integers:   x and the weight are INT8
    evict:      Triton's policy for weights
    pdl: whether it is launched before the kernel that rounds x has ended
    """

    split_k: bool
    sequential: bool
    even_k: bool
    blocks: bool
    integers: bool
    evict: str
    bm: int
    bn: int
    bk: int
    pdl: bool


@triton.jit
def _sum_steps(x_at, w_at, x_scales, w_scales, in_x, begin, end, M, N, K, FORM: tl.constexpr):
    """Return sums fp32 [bn, bm] over the steps begin .. end along K."""
    BM: tl.constexpr = FORM.bm
    BN: tl.constexpr = FORM.bn
    BK: tl.constexpr = FORM.bk
    SUM: tl.constexpr = tl.int32 if FORM.integers else tl.float32
    accumulator = tl.zeros([BN, BM], SUM)
    column = tl.arange(0, BK)
    tl.assume(end > begin)
    for step in range(begin, end):
        if FORM.even_k:
            weight = tl.load(w_at + step * BK, eviction_policy=FORM.evict)
            x_tile = tl.load(x_at + step * BK, mask=in_x, other=0.0)
        else:
            inside = step * BK + column < K
            weight = tl.load(w_at + step * BK, mask=inside[None, :], other=0.0, eviction_policy=FORM.evict)
            x_tile = tl.load(x_at + step * BK, mask=in_x & inside[:, None], other=0.0)
        if FORM.blocks:
            of_x = tl.load(x_scales + step * M, mask=in_x, other=0.0)
            scale = tl.load(w_scales + step * N)[:, None] * of_x
            accumulator += tl.dot(weight, x_tile) * scale
        elif FORM.integers:
            accumulator = tl.dot(weight, x_tile, accumulator, out_dtype=tl.int32)
        else:
            accumulator = tl.dot(weight, x_tile, accumulator, max_num_imprecise_acc=128)
    return accumulator.to(tl.float32)


@triton.jit
def _store(y_at, sums, x_scales, w_scales, in_x, in_y, FORM: tl.constexpr):
    if not FORM.blocks:
        sums *= tl.load(w_scales)[:, None] * tl.load(x_scales, mask=in_x, other=0.0)
    tl.store(y_at, sums.to(y_at.dtype.element_ty), mask=in_y)


@triton.jit(
    do_not_specialize=["M", "tiles_m", "splits"],
    repr=lambda form: "int8_inputs_kernel" if form.constants["FORM"].integers else "fp8_kernel",
)
def fp8_kernel(
    x, x_scale, weight, w_scale, y, partials, semaphores, M, N, K, tiles_m, splits,
    FORM: tl.constexpr,
):  # fmt: skip
    """The grid has the tiles of y, with all tiles of the same rows of the weight together; if each split has
    a CTA, the grid is as many times as large.
    """
    BM: tl.constexpr = FORM.bm
    BN: tl.constexpr = FORM.bn
    BK: tl.constexpr = FORM.bk
    PER_UNIT: tl.constexpr = UNIT // BK
    steps, units = tl.cdiv(K, BK), tl.cdiv(K, UNIT)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile // tiles_m * BN + tl.arange(0, BN)
    m = (tile % tiles_m * BM + tl.arange(0, BM)).to(tl.int64)
    row = tl.minimum(n, N - 1).to(tl.int64)  # past the end: the last again, and not stored
    column = tl.arange(0, BK)
    in_x = (m < M)[None, :]
    x_at = x + m[None, :] * K + column[:, None]
    w_at = weight + row[:, None] * K + column[None, :]
    x_scales = x_scale + m[None, :]
    w_scales = w_scale + row
    y_at = y + m[None, :] * N + n[:, None]
    in_y = (n < N)[:, None] & in_x
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    if FORM.sequential:
        total = tl.zeros([BN, BM], tl.float32)
        for index in range(splits):
            first, last = index * units // splits * PER_UNIT, (index + 1) * units // splits * PER_UNIT
            total += _sum_steps(
                x_at, w_at, x_scales, w_scales, in_x, first, tl.minimum(last, steps), M, N, K, FORM
            )
        _store(y_at, total, x_scales, w_scales, in_x, in_y, FORM)
    else:
        first, last = split * units // splits * PER_UNIT, (split + 1) * units // splits * PER_UNIT
        sums = _sum_steps(x_at, w_at, x_scales, w_scales, in_x, first, tl.minimum(last, steps), M, N, K, FORM)
        if FORM.split_k:
            at = partials_of(partials, tile, splits, BN, BM)
            if ends_last(at, sums, semaphores + tile, split, splits, BN, BM):
                total = sum_of_splits(at, semaphores + tile, splits, BN, BM)
                _store(y_at, total, x_scales, w_scales, in_x, in_y, FORM)
        else:
            _store(y_at, sums, x_scales, w_scales, in_x, in_y, FORM)


def matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    semaphores: Tensor,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """Return a new y [M, N] of `dtype`; the file's docstring describes the other arguments.

    semaphores: int32 zeros, `tiles.semaphores_of(N)` of them, for this weight alone
    tile: overrides the table, for tuning
    """
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    if m == 0:
        return y
    blocks = w_scale.shape[0] > 1
    splits = splits_of(n, k)
    sequential = splits > 1 and m > MAX_SPLIT_ROWS
    tile = tile or tile_for(m, sequential, blocks)
    bk = GROUP if blocks else tile.bk
    own = 1 if sequential else splits
    tiles_m, tiles_n = triton.cdiv(m, tile.bm), triton.cdiv(n, tile.bn)
    scratch = tiles_m * tiles_n * tile.bm * tile.bn * splits if own > 1 else 1
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    pdl = compute_capability(x.device) >= (9, 0)
    form = Form(
        split_k=splits > 1,
        sequential=sequential,
        even_k=k % bk == 0,
        blocks=blocks,
        integers=x.dtype == torch.int8,
        evict="evict_first" if tiles_m == 1 else "",
        bm=tile.bm,
        bn=tile.bn,
        bk=bk,
        pdl=pdl,
    )
    fp8_kernel[(tiles_m * tiles_n, own)](
        x, x_scale, weight, w_scale, y, partials, semaphores, m, n, k, tiles_m, splits, form,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    return y
