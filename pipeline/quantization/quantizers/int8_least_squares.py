"""INT8 by least squares (`integer_least_squares.py`): a scale for each group, and no zero point."""

import torch
from torch import Tensor

from ....layouts.formats.int8 import Int8, Int8Weight
from ..solvers.column_sums import fold, solve_rows, total
from ..solvers.integer_least_squares import INT8_CODES, centred_codes, search
from .quantizer import QuantizedWeight


def quantize_int8(weight: Tensor, spec: Int8, scale_dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    """Quantize finite `weight` [N, K] of any float dtype, on the weight's own device."""
    n, k = weight.shape
    refusal = spec.refuses(n, k)
    if refusal is not None:
        raise ValueError(refusal)
    groups = spec.groups(k)
    device = weight.device
    codes = torch.empty(n, k, dtype=torch.int8, device=device)
    scale = torch.empty(n, groups, dtype=scale_dtype, device=device)
    error = torch.empty(n, groups, dtype=torch.float32, device=device)
    norm = torch.empty(n, groups, dtype=torch.float32, device=device)

    def solve(block: slice) -> None:
        x = weight[block].float().view(-1, k // groups).T.contiguous()
        s, zero = search(x, INT8_CODES, True, scale_dtype)
        d = centred_codes(x, s, zero, INT8_CODES)
        codes[block] = d.to(torch.int8).T.reshape(-1, k)
        error[block] = fold(d.mul_(s).sub_(x).square_()).view(-1, groups)
        norm[block] = fold(x.mul_(x)).view(-1, groups)
        scale[block] = s.view(-1, groups).to(scale_dtype)

    solve_rows(solve, n, k, device)
    return QuantizedWeight(Int8Weight(spec, codes, scale), total(error), total(norm))
