"""A whole layer of INT4 experts, for any number of tokens; Triton kernels for SiLU and the weighted sum.

    x        [T, K]          bf16 or fp16
    expert   int [T, top_k]  0 .. E-1
    weight   [T, top_k]      the router's, any floating type
    y        [T, N]          sum_j weight[t, j] * down_j(silu(gate_j(x[t])) * up_j(x[t])), x's type

One token uses `one_token.py`; more tokens use grouped products, with this file's kernels between them. The
kernels are chosen at each call, so a graph that was traced once serves any number of tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..device import compute_capability
from ..triton_imports import tl, triton
from . import int4, one_token
from .one_token import Int4Operand
from .routing import route

SILU_BLOCK, SUM_BLOCK = 1024, 512
"""Columns of a program, eight of a thread."""


def silu_and_multiply_reference(gate_up: Tensor) -> Tensor:
    """Multiply SiLU of the gate by up: [A, I] from [A, 2I], whose first half is the gate; rounded once."""
    gate, up = gate_up.float().chunk(2, dim=1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def weighted_sum_reference(rows: Tensor, weight: Tensor) -> Tensor:
    """Sum each token's rows [T * top_k, N] by `weight` [T, top_k], to [T, N], with one rounding."""
    of_token = rows.view(*weight.shape, -1).float() * weight.float().unsqueeze(-1)
    return of_token.sum(dim=1).to(rows.dtype)


@triton.jit
def silu_and_multiply_kernel(gate_up, y, inner, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    number = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * inner + column, number.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["weight"])
def weighted_sum_kernel(rows, weight, y, N, TAKEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Experts are added in the order in which the token took them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for taken in tl.static_range(TAKEN):
        assignment = token * TAKEN + taken
        share = tl.load(weight + assignment).to(tl.float32)
        total += tl.load(rows + assignment * N + column, mask=inside, other=0.0).to(tl.float32) * share
    tl.store(y + token * N + column, total.to(y.dtype.element_ty), mask=inside)


def silu_and_multiply(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply SiLU of the gate by up: [A, I] from [A, 2I]; in `out` if it is given."""
    count, inner = len(gate_up), gate_up.shape[1] // 2
    y = torch.empty((count, inner), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    pdl = compute_capability(gate_up.device) >= (9, 0)
    silu_and_multiply_kernel[(count, triton.cdiv(inner, SILU_BLOCK))](
        gate_up, y, inner, BLOCK=SILU_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return y


def weighted_sum(rows: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum each token's rows [T * top_k, N] by `weight` [T, top_k], to [T, N]; in `out` if it is given."""
    (tokens, taken), n = weight.shape, rows.shape[1]
    y = torch.empty((tokens, n), dtype=rows.dtype, device=rows.device) if out is None else out
    pdl = compute_capability(rows.device) >= (9, 0)
    weighted_sum_kernel[(tokens, triton.cdiv(n, SUM_BLOCK))](
        rows, weight.contiguous(), y, n, TAKEN=taken, BLOCK=SUM_BLOCK, PDL=pdl, num_warps=2, launch_pdl=pdl
    )
    return y


def gated_experts(
    x: Tensor, expert: Tensor, weight: Tensor, gate_up: Int4Operand, down: Int4Operand
) -> Tensor:
    """Return y [T, N]; the file's docstring describes the tensors."""
    if len(x) == 1 and expert.shape[1] <= one_token.MOST_TAKEN and one_token.serves(gate_up, down):
        return one_token.experts(x, expert, weight, gate_up, down)
    return grouped_experts(x, expert, weight, gate_up, down)


def grouped_experts(
    x: Tensor, expert: Tensor, weight: Tensor, gate_up: Int4Operand, down: Int4Operand
) -> Tensor:
    """Compute the whole layer with grouped products, for any number of tokens."""
    routing = route(expert, len(gate_up.words))

    def multiply(rows: Tensor, operand: Int4Operand) -> Tensor:
        form = operand.n, operand.group_size, operand.fractional
        return int4.grouped_matmul(rows, operand.words, operand.scale_words, routing, *form)

    return weighted_sum(multiply(silu_and_multiply(multiply(x, gate_up)), down), weight)
