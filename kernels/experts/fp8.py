"""Grouped products on FP8 experts (W8A8): y[a] = (w[expert of a] * w_scale) . (x[a // r] * x_scale); Triton.

    x        [R, K]     float8_e4m3fn, rows contiguous; r = A // R assignments share a row
    x_scale  [G, R]     fp32
    weight   [E, N, K]  float8_e4m3fn, contiguous
    w_scale  [E, G, N]  fp32
    y        [A, N]     bf16 or fp16, by assignment; not written if an assignment is in no block

G, the number of scales of a row, is 1, or K/128 if a row has a scale for every 128 columns. The weight is the
first operand ("swap AB"), and blocks are as in `unquantized.py`. Sums of 128 columns are added to earlier
sums in fp32, since Hopper sums products of E4M3 with 14 bits (`../fp8/matmul.py`); with several scales, each
sum is multiplied by its scale first. Sums over K run in one order, whatever the tile.

A decode step reads N K bytes for each chosen expert. Inputs are rounded beforehand (`../fp8/round_rows.py`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .routing import ExpertRouting
from .tile import Tile

GROUP = 128
"""Columns of a step, which share a scale if a row has several."""
TILES = (
    Tile(n=64, k=GROUP, stages=5, warps=4),
    Tile(n=64, k=GROUP, stages=5, warps=4),
    Tile(n=64, k=GROUP, stages=5, warps=4),
    Tile(n=128, k=GROUP, stages=4, warps=4),
    Tile(n=128, k=GROUP, stages=4, warps=8),
    Tile(n=128, k=GROUP, stages=4, warps=8),
)
"""By bucket of rows an expert gets, see `tile.py`.

The first three and the last as tuned on an H100 for Qwen3-30B-A3B's shapes (`tests/bench/kernels/experts.py
--tune --kinds fp8`), the last with blocks of 64 rows.
"""
MOST_ROWS = 64
"""Rows of x in a CTA: sums in two levels take registers twice, so that larger blocks are taken in parts."""
REUSED_FROM = 64
"""Rows of a block from which an expert is likely to have several: its weight then stays in the cache."""


class Form(NamedTuple):
    """Compile-time parameters of the kernel.

    shared_by: assignments that share a row of x
    even_k:    whether K is a whole number of steps
    blocks:    a row has a scale for every 128 columns
    evict:     Triton's policy for weights
    parts:     CTAs that share a block's rows
    """

    shared_by: int
    even_k: bool
    blocks: bool
    evict: str
    parts: int
    bm: int
    bn: int
    bk: int
    pdl: bool


@triton.jit(do_not_specialize=["count", "inputs"])
def fp8_grouped_kernel(
    x, x_scale, weight, w_scale, y, assignments, block_expert, count, inputs, N, K, FORM: tl.constexpr
):
    """Sum acc [bn, bm] += weight tile [bn, bk] . x tile [bm, bk]^T over K.

    The grid is (blocks * parts * row tiles).
    """
    BM: tl.constexpr = FORM.bm
    BN: tl.constexpr = FORM.bn
    BK: tl.constexpr = FORM.bk
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(N, BN)
    block = tl.program_id(0) // tiles
    expert = tl.load(block_expert + block // FORM.parts).to(tl.int64)
    if expert < 0:
        return
    row = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    kept = tl.minimum(row, N - 1).to(tl.int64)  # past the end: the last again, and not stored
    column = tl.arange(0, BK)
    assignment = tl.load(assignments + block * BM + tl.arange(0, BM)).to(tl.int64)
    taken = (assignment < count)[None, :]
    input_row = (assignment // FORM.shared_by)[None, :]
    steps = tl.cdiv(K, BK)
    x_at = x + input_row * K + column[:, None]
    w_at = weight + (expert * N + kept)[:, None] * K + column[None, :]
    x_scales = x_scale + input_row
    w_scales = w_scale + (expert * N * steps if FORM.blocks else expert * N) + kept
    accumulator = tl.zeros([BN, BM], tl.float32)
    tl.assume(steps > 0)
    for step in range(0, steps):
        if FORM.even_k:
            weight_tile = tl.load(w_at + step * BK, eviction_policy=FORM.evict)
            x_tile = tl.load(x_at + step * BK, mask=taken, other=0.0)
        else:
            inside = step * BK + column < K
            weight_tile = tl.load(
                w_at + step * BK, mask=inside[None, :], other=0.0, eviction_policy=FORM.evict
            )
            x_tile = tl.load(x_at + step * BK, mask=taken & inside[:, None], other=0.0)
        if FORM.blocks:
            of_x = tl.load(x_scales + step * inputs, mask=taken, other=0.0)
            scale = tl.load(w_scales + step * N)[:, None] * of_x
            accumulator += tl.dot(weight_tile, x_tile) * scale
        else:
            accumulator = tl.dot(weight_tile, x_tile, accumulator, max_num_imprecise_acc=128)
    if not FORM.blocks:
        accumulator *= tl.load(w_scales)[:, None] * tl.load(x_scales, mask=taken, other=0.0)
    to = assignment[None, :] * N + row[:, None]
    tl.store(y + to, accumulator.to(y.dtype.element_ty), mask=taken & (row < N)[:, None])


def grouped_matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    routing: ExpertRouting,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """Return y [A, N] of `dtype`; the file's docstring describes the tensors. `tile` overrides the table, for
    tuning.
    """
    _, n, k = weight.shape
    blocks = w_scale.shape[1] > 1
    tile = tile or TILES[routing.bucket]
    rows = min(routing.block_rows, MOST_ROWS)
    parts = routing.block_rows // rows
    y = torch.empty((routing.count, n), dtype=dtype, device=x.device)
    capability = compute_capability(x.device)
    pdl = capability >= (9, 0)
    form = Form(
        shared_by=routing.rows_per_input(len(x)),
        even_k=k % tile.k == 0,
        blocks=blocks,
        evict="evict_first" if routing.block_rows < REUSED_FROM else "",
        parts=parts,
        bm=rows,
        bn=tile.n,
        bk=tile.k,
        pdl=pdl,
    )
    fp8_grouped_kernel[(routing.blocks * parts * triton.cdiv(n, tile.n),)](
        x, x_scale, weight, w_scale, y, routing.assignments, routing.block_expert,
        routing.count, len(x), n, k, form,
        num_warps=tile.warps_on(capability, rows), num_stages=tile.stages_on(capability),
        launch_pdl=pdl,
    )  # fmt: skip
    return y
