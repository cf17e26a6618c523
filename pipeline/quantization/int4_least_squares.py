"""Our INT4 solver: for each group, the scale and the integer zero point with the least squared error.

HQQ's idea (alternate between codes and parameters, no calibration data) with what engines can store: the
zero is one of 0..15 and the scale is rounded to its stored dtype inside the search. It reads no file.

For a group x of g weights, zero z and scale s, the best codes are `d = clamp(round(x/s), -z, 15-z)`, and for
those the best scale is `<x,d>/<d,d>`, which leaves the error `<x,x> - <x,d>²/<d,d>`. So one pass over x
judges a candidate (s, z) with the scale already refined. The search takes every clipping ratio at the
nearest zero and its neighbours, then alternates from the best with the scale as it will be stored.

Groups lie along the last dimension and elements along the first ([g, groups]); sums fold halves. Only single
IEEE operations in a fixed order touch a number, so the bits do not depend on threads, chunks or the device.
"""

import torch
from torch import Tensor

from ...layouts.formats.int4 import SYMMETRIC_ZERO, Int4, Int4Weight, pack_nibbles
from .column_sums import fold, solve_rows, total
from .quantizer import Quantized

CLIPPING_RATIOS = tuple(1.08 - 0.04 * i for i in range(10))
ZERO_OFFSETS = (0, -1, 1)
REFINEMENTS = 4
MAX_CODE = 15


def quantize_int4(weight: Tensor, spec: Int4, scale_dtype: torch.dtype = torch.bfloat16) -> Quantized:
    """Quantize finite `weight` [N, K] of any float dtype, on the device it lies on, with integer zeros."""
    n, k = weight.shape
    refusal = spec.refuses(n, k)
    if refusal is not None:
        raise ValueError(refusal)
    groups = spec.groups(k)
    device = weight.device
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(n, groups, dtype=scale_dtype, device=device)
    zero = torch.empty(n, groups, dtype=torch.uint8, device=device)
    error = torch.empty(n, groups, dtype=torch.float32, device=device)
    norm = torch.empty(n, groups, dtype=torch.float32, device=device)

    def solve(block: slice) -> None:
        x = weight[block].float().view(-1, k // groups).T.contiguous()
        s, z = _search(x, spec.symmetric, scale_dtype)
        d = _centred_codes(x, s, z)
        remainder = x - d * s
        error[block] = fold(remainder.mul_(remainder)).view(-1, groups)
        norm[block] = fold(x.mul_(x)).view(-1, groups)
        shifted = d.add_(z).to(torch.uint8).T.contiguous().view(-1, k)
        codes[block] = pack_nibbles(shifted)
        scale[block] = s.view(-1, groups).to(scale_dtype)
        zero[block] = z.view(-1, groups).to(torch.uint8)

    solve_rows(solve, n, k, device)
    return Quantized(Int4Weight(spec, codes, scale, zero), total(error), total(norm))


def _search(x: Tensor, symmetric: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scale (fp32, exactly representable in `scale_dtype`) and zero of each column of x [g, groups]."""
    smallest = max(torch.finfo(scale_dtype).smallest_normal * 2.0**-10, 2.0**-120)
    low, high = x.amin(0).clamp_(max=0), x.amax(0).clamp_(min=0)
    if symmetric:
        widest = torch.maximum(high * (1 / (MAX_CODE - SYMMETRIC_ZERO)), low * (-1 / SYMMETRIC_ZERO))
        zeros = [torch.full_like(widest, SYMMETRIC_ZERO)]
    else:
        widest = (high - low) * (1 / MAX_CODE)
        nearest = torch.round(-low / widest.clamp(min=smallest))
        zeros = [(nearest + offset).clamp_(0, MAX_CODE) for offset in ZERO_OFFSETS]
    widest.clamp_(min=smallest)
    scratch = torch.empty_like(x), torch.empty_like(x)

    best = torch.zeros_like(widest)
    scale, zero = widest.clone(), zeros[0].clone()
    for candidate in zeros:
        for ratio in CLIPPING_RATIOS:
            dot, square = _products(x, widest * ratio, candidate, scratch)
            refined = dot / square.clamp_(min=smallest)
            explained = refined * dot
            better = (explained > best) & (refined > 0)
            best = torch.where(better, explained, best)
            scale = torch.where(better, refined, scale)
            zero = torch.where(better, candidate, zero)

    best = torch.full_like(widest, -torch.inf)
    stored = scale
    for _ in range(REFINEMENTS):
        scale = scale.to(scale_dtype).float().clamp_(min=smallest)
        dot, square = _products(x, scale, zero, scratch)
        explained = scale * (2 * dot - scale * square)
        better = explained > best
        best = torch.where(better, explained, best)
        stored = torch.where(better, scale, stored)
        scale = torch.where(square > 0, dot / square.clamp_(min=smallest), scale)
    empty = (low == 0) & (high == 0)
    one, centre = torch.ones_like(stored), torch.full_like(zero, SYMMETRIC_ZERO)
    return torch.where(empty, one, stored), torch.where(empty, centre, zero)


def _centred_codes(x: Tensor, scale: Tensor, zero: Tensor, out: Tensor | None = None) -> Tensor:
    """`code - zero` for every weight, in fp32."""
    out = torch.mul(x, 1.0 / scale, out=out)
    return torch.clamp(out.round_(), -zero, MAX_CODE - zero, out=out)


def _products(
    x: Tensor, scale: Tensor, zero: Tensor, scratch: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """`<x, d>` and `<d, d>` of each column, d being its centred codes."""
    codes, products = scratch
    d = _centred_codes(x, scale, zero, out=codes)
    dot = fold(torch.mul(x, d, out=products))
    return dot, fold(d.mul_(d))
