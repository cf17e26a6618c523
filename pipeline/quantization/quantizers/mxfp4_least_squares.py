"""MXFP4: for every 32 weights, the power of two under which E2M1 has the least squared error.

The usual scale brings a group's largest magnitude between 4 and 8, and what is above 6 is clipped. The search
tries that scale, its half and its double. Only single IEEE operations in a fixed order touch a number, so the
bits do not depend on threads, chunks or the device.
"""

import torch
from torch import Tensor

from ....layouts.formats.int4 import pack_nibbles
from ....layouts.formats.mxfp4 import BIAS, GROUP_SIZE, MXFP4, MXFP4Weight, from_e8m0
from ..solvers.column_sums import fold, solve_rows, total
from .nvfp4_least_squares import codes_of, nearest_e2m1
from .quantizer import QuantizedWeight

LARGEST_EXPONENT_OF_A_CODE = 2
OFFSETS = (0, 1, -1)
"""From the usual scale outwards, so that of equal scales the usual one stays."""
LEAST, MOST = 2, 2 * BIAS - 3
"""Of a usual scale's byte: its half is a normal float32 number, and 6 times its double is finite."""


def quantize_mxfp4(weight: Tensor, spec: MXFP4) -> QuantizedWeight:
    """Quantize finite `weight` [N, K] of any float dtype, on the weight's own device."""
    n, k = weight.shape
    refusal = spec.refuses(n, k)
    if refusal is not None:
        raise ValueError(refusal)
    groups, device = k // GROUP_SIZE, weight.device
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(n, groups, dtype=torch.uint8, device=device)
    error = torch.empty(n, groups, dtype=torch.float32, device=device)
    norm = torch.empty(n, groups, dtype=torch.float32, device=device)

    def solve(block: slice) -> None:
        x = weight[block].float().view(-1, GROUP_SIZE).T.contiguous()
        magnitude = x.abs()
        usual = (magnitude.amax(0).view(torch.int32) >> 23) - LARGEST_EXPONENT_OF_A_CODE
        usual.clamp_(LEAST, MOST)
        unit = from_e8m0(usual)
        y = magnitude * (1.0 / unit)
        best = torch.full_like(unit, torch.inf)
        offset = torch.zeros_like(usual)
        for candidate in OFFSETS:
            found = _squared_error(y, 2.0**candidate)
            offset = torch.where(found < best, candidate, offset)
            best = torch.minimum(found, best)
        byte = (usual + offset).to(torch.uint8)
        q = nearest_e2m1(magnitude, 1.0 / from_e8m0(byte))
        nibbles = codes_of(q) | (x.signbit() & (q > 0)).to(torch.uint8) << 3
        error[block] = (best * unit * unit).view(-1, groups)
        norm[block] = fold(magnitude.mul_(magnitude)).view(-1, groups)
        codes[block] = pack_nibbles(nibbles.T.contiguous().view(-1, k))
        scale[block] = byte.view(-1, groups)

    solve_rows(solve, n, k, device)
    return QuantizedWeight(MXFP4Weight(spec, codes, scale), total(error), total(norm))


def _squared_error(y: Tensor, step: float) -> Tensor:
    """Return the squared error of magnitudes y [32, groups] as codes of so large a step."""
    remainder = y - nearest_e2m1(y, y.new_full((), 1.0 / step)) * step
    return fold(remainder.mul_(remainder))
