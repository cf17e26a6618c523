"""Grouped products on unquantized experts: y[a] = w[expert of a] . x[a // r] + bias; Triton, and reference.

    x        [R, K]      bf16, fp16 or fp32, rows contiguous; r = A // R consecutive assignments share a row
    weight   [E, N, K]   x's dtype; K contiguous, or N (a transposed view of [E, K, N], as gpt_oss stores it)
    bias     [E, N]      x's dtype, or None
    y        [A, N]      by assignment; not written if an assignment is in no block

A CTA takes n rows of an expert's weight and one block of its assignments. The weight is the first operand of
the matrix instruction ("swap AB"), so that a block of 8 rows costs an instruction of N = 8 and no more. The
CTAs of a block are neighbours, and so are the blocks of an expert: data that is read twice is in the L2
cache. A decode step reads 2 * N * K bytes for each chosen expert. Sums over K run in one order, in fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .routing import ExpertRouting
from .tile import Tile

TILES = (
    Tile(n=64, k=128, stages=4, warps=4),
    Tile(n=64, k=128, stages=4, warps=4),
    Tile(n=64, k=128, stages=3, warps=4),
    Tile(n=128, k=64, stages=3, warps=4),
    Tile(n=128, k=64, stages=4, warps=8),
    Tile(n=128, k=64, stages=3, warps=8),
)
"""By bucket of rows an expert gets, see `tile.py`."""
FLOAT32_TILE = Tile(n=32, k=32, stages=2, warps=4)
"""Of fp32, which no matrix unit multiplies exactly: right, and not fast."""
REUSED_FROM = 64
"""Rows of a block from which an expert is likely to have several: its weight then stays in the cache."""


def grouped_matmul_reference(x: Tensor, weight: Tensor, expert: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y [A, N] for `expert` [T, top_k], computed in fp64, one expert at a time."""
    flat = expert.flatten()
    rows = x.repeat_interleave(len(flat) // len(x), 0).double()
    y = torch.zeros(len(flat), weight.shape[1], dtype=torch.float64, device=x.device)
    for index in range(len(weight)):
        mine = flat == index
        y[mine] = rows[mine] @ weight[index].double().t()
        if bias is not None:
            y[mine] += bias[index].double()
    return y


class Form(NamedTuple):
    """Compile-time parameters of the kernel; shared_by: assignments that share a row of x; evict: Triton's
    policy for weights."""

    shared_by: int
    even_n: bool
    even_k: bool
    evict: str
    precision: str
    bm: int
    bn: int
    bk: int
    pdl: bool


@triton.jit(do_not_specialize=["count"])
def grouped_kernel(
    x, weight, bias, y, assignments, block_expert, count, N, K, x_stride, expert_stride, n_stride, k_stride,
    FORM: tl.constexpr,
):  # fmt: skip
    """Sum acc [bn, bm] += weight tile [bn, bk] . x tile [bm, bk]^T over K; grid (blocks * row tiles)."""
    BM: tl.constexpr = FORM.bm
    BN: tl.constexpr = FORM.bn
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(N, BN)
    block = tl.program_id(0) // tiles
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    row = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    column = tl.arange(0, FORM.bk)
    assignment = tl.load(assignments + block * BM + tl.arange(0, BM)).to(tl.int64)
    taken = assignment < count
    x_at = x + (assignment // FORM.shared_by)[None, :] * x_stride + column[:, None]
    weight_at = weight + expert * expert_stride + row[:, None] * n_stride + column[None, :] * k_stride
    accumulator = tl.zeros([BN, BM], tl.float32)
    for k in range(0, K, FORM.bk):
        x_inside = taken[None, :]
        if not FORM.even_k:
            x_inside = x_inside & (k + column < K)[:, None]
        if FORM.even_n and FORM.even_k:
            weight_tile = tl.load(weight_at, eviction_policy=FORM.evict)
        else:
            inside = (row < N)[:, None] & (k + column < K)[None, :]
            weight_tile = tl.load(weight_at, mask=inside, other=0.0, eviction_policy=FORM.evict)
        x_tile = tl.load(x_at, mask=x_inside, other=0.0)
        accumulator = tl.dot(weight_tile, x_tile, accumulator, input_precision=FORM.precision)
        weight_at += FORM.bk * k_stride
        x_at += FORM.bk
    if bias is not None:
        of_row = tl.load(bias + expert * N + row, mask=row < N, other=0.0)
        accumulator += of_row.to(tl.float32)[:, None]
    to = assignment[None, :] * N + row[:, None]
    tl.store(y + to, accumulator.to(y.dtype.element_ty), mask=taken[None, :] & (row < N)[:, None])


def grouped_matmul(
    x: Tensor, weight: Tensor, routing: ExpertRouting, bias: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """Return y [A, N]; the file's docstring describes the tensors. `tile` overrides the table, for tuning."""
    _, n, k = weight.shape
    if 1 not in weight.stride()[1:]:
        raise ValueError(f"neither N nor K of the experts' weight is contiguous: strides {weight.stride()}")
    exact = x.dtype == torch.float32
    tile = tile or (FLOAT32_TILE if exact else TILES[routing.bucket])
    y = torch.empty((routing.count, n), dtype=x.dtype, device=x.device)
    capability = compute_capability(x.device)
    pdl = capability >= (9, 0)
    form = Form(
        shared_by=routing.rows_per_input(len(x)),
        even_n=n % tile.n == 0,
        even_k=k % tile.k == 0,
        evict="evict_first" if routing.block_rows < REUSED_FROM else "",
        precision="ieee" if exact else "tf32",
        bm=routing.block_rows,
        bn=tile.n,
        bk=tile.k,
        pdl=pdl,
    )
    grouped_kernel[(routing.blocks * triton.cdiv(n, tile.n),)](
        x, weight, bias, y, routing.assignments, routing.block_expert, routing.count,
        n, k, x.stride(0), *weight.stride(), form,
        num_warps=tile.warps_on(capability, routing.block_rows), num_stages=tile.stages_on(capability),
        launch_pdl=pdl,
    )  # fmt: skip
    return y
