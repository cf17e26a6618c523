"""Rounds activations to E4M3 in the kernel that makes them: RMSNorm, and SiLU times up; Triton.

    codes   [M, K]   float8_e4m3fn       scales  [1, M]   fp32, the largest magnitude of a row over 448

    norm      h = x + residual, rounded to its type; y = h * rsqrt(mean(h * h) + eps) * weight
    SiLU      y = gate / (1 + exp(-gate)) * up, from gate_up [M, 2K], whose first half is the gate

y is rounded to x's type first, once, and its codes and scales are those of `round_rows.py` for that y, bit
for bit. y itself need not be written: an apart rounding reads M K numbers of two bytes that another kernel
has just written, and is a launch more. A row stays in the registers of one CTA.
"""

import torch
from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .round_rows import CONVERTS_TWICE, FEW_ROWS, codes_of, scale_of

PIECE = 4096
MOST_COLUMNS = 8 * PIECE
"""Of a row, which is held in pieces."""


def norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return h and y, both [M, K] of x's type."""
    h = x if residual is None else x + residual
    wide = h.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return h, y.to(x.dtype)


def silu_reference(gate_up: Tensor) -> Tensor:
    """Return y [M, K] of gate_up [M, 2K]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


@triton.jit(do_not_specialize=["eps"])
def norm_and_round_kernel(
    x, residual, weight, h, y, codes, scales, K, eps,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, ADDS: tl.constexpr, KEEPS: tl.constexpr,
    TWICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row. ADDS: the residual is added, and h written. KEEPS: y is written, too."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    pieces = ()
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        at = i * BLOCK + column
        inside = at < K
        values = tl.load(x + row * K + at, mask=inside, other=0.0)
        if ADDS:
            more = tl.load(residual + row * K + at, mask=inside, other=0.0)
            values = (values.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
            tl.store(h + row * K + at, values, mask=inside)
        pieces = pieces + (values,)  # type: ignore[assignment]  # noqa: RUF005
        wide = values.to(tl.float32)
        squares += wide * wide
    factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    normed = ()
    largest = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        at = i * BLOCK + column
        inside = at < K
        of_column = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        values = (pieces[i].to(tl.float32) * factor * of_column).to(x.dtype.element_ty)
        if KEEPS:
            tl.store(y + row * K + at, values, mask=inside)
        normed = normed + (values,)  # type: ignore[assignment]  # noqa: RUF005
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    scale = scale_of(tl.max(largest, axis=0), False)
    tl.store(scales + row, scale)
    for i in tl.static_range(PIECES):
        at = i * BLOCK + column
        tl.store(codes + row * K + at, codes_of(normed[i].to(tl.float32), scale, TWICE, False), mask=at < K)


@triton.jit
def silu_and_round_kernel(
    gate_up, codes, scales, K,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, TWICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    pieces = ()
    largest = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        at = i * BLOCK + column
        inside = at < K
        gate = tl.load(gate_up + row * 2 * K + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * K + K + at, mask=inside, other=0.0).to(tl.float32)
        values = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty)
        pieces = pieces + (values,)  # type: ignore[assignment]  # noqa: RUF005
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    scale = scale_of(tl.max(largest, axis=0), False)
    tl.store(scales + row, scale)
    for i in tl.static_range(PIECES):
        at = i * BLOCK + column
        tl.store(codes + row * K + at, codes_of(pieces[i].to(tl.float32), scale, TWICE, False), mask=at < K)


def norm_and_round(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, keeps: bool, warps: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h [M, K], y [M, K], codes and scales.

    x, residual: [M, K], contiguous; without a residual h is an empty tensor
    keeps: whether y is written; otherwise it is an empty tensor
    warps: overrides the table, for tuning
    """
    m, k = x.shape
    h = x.new_empty((m, k) if residual is not None else (0, k))
    y = x.new_empty((m, k) if keeps else (0, k))
    codes, scales = _outputs(x, k)
    if m == 0:
        return h, y, codes, scales
    block, pieces, twice, pdl = _form(x.device, k)
    warps = warps or warps_for(m, block)
    norm_and_round_kernel[(m,)](
        x, x if residual is None else residual, weight, h, y, codes, scales, k, eps,
        block, pieces, residual is not None, keeps, twice, pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return h, y, codes, scales


def silu_and_round(gate_up: Tensor, warps: int | None = None) -> tuple[Tensor, Tensor]:
    """Return codes [M, K] and scales [1, M] of gate_up [M, 2K], contiguous."""
    m, k = gate_up.shape[0], gate_up.shape[1] // 2
    codes, scales = _outputs(gate_up, k)
    if m == 0:
        return codes, scales
    block, pieces, twice, pdl = _form(gate_up.device, k)
    warps = warps or warps_for(m, block)
    silu_and_round_kernel[(m,)](
        gate_up, codes, scales, k, block, pieces, twice, pdl, num_warps=warps, launch_pdl=pdl
    )
    return codes, scales


def warps_for(m: int, block: int) -> int:
    """Return the warps of a CTA: with few rows a GPU has more multiprocessors than CTAs."""
    return min(16, max(1, block // (256 if m <= FEW_ROWS else 512)))


def _outputs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(len(x), k, dtype=torch.float8_e4m3fn, device=x.device)
    return codes, torch.empty(1, len(x), dtype=torch.float32, device=x.device)


def _form(device: torch.device, k: int) -> tuple[int, int, bool, bool]:
    """Return columns of a piece, pieces, and whether this GPU converts twice and launches dependents."""
    block = min(PIECE, triton.next_power_of_2(k))
    capability = compute_capability(device)
    return block, triton.cdiv(k, block), capability == CONVERTS_TWICE, capability >= (9, 0)
