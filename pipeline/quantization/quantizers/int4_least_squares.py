"""INT4 with integer zero points, by least squares (`integer_least_squares.py`)."""

import torch
from torch import Tensor

from ....layouts.formats.int4 import Int4, Int4Weight, pack_nibbles
from ..solvers.column_sums import fold, solve_rows, total
from ..solvers.integer_least_squares import INT4_CODES, centred_codes, search
from .quantizer import QuantizedWeight


def quantize_int4(weight: Tensor, spec: Int4, scale_dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    """Quantize finite `weight` [N, K] of any float dtype, on the weight's own device, with integer zeros."""
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
        s, z = search(x, INT4_CODES, spec.symmetric, scale_dtype)
        d = centred_codes(x, s, z, INT4_CODES)
        remainder = x - d * s
        error[block] = fold(remainder.mul_(remainder)).view(-1, groups)
        norm[block] = fold(x.mul_(x)).view(-1, groups)
        shifted = d.add_(z).to(torch.uint8).T.contiguous().view(-1, k)
        codes[block] = pack_nibbles(shifted)
        scale[block] = s.view(-1, groups).to(scale_dtype)
        zero[block] = z.view(-1, groups).to(torch.uint8)

    solve_rows(solve, n, k, device)
    return QuantizedWeight(Int4Weight(spec, codes, scale, zero), total(error), total(norm))
