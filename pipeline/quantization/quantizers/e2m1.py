"""E2M1 for the solvers: rounding with any scale, and the format's fifteen values in order, as levels.

Level 7 is zero; level 0 is -6, level 14 is 6 (`learned_rounding.py`). NVFP4 and MXFP4 have these values and
differ in their scales.
"""

import torch
from torch import Tensor

from ....layouts.formats.int4 import pack_nibbles, unpack_nibbles
from ....layouts.formats.nvfp4 import E2M1_MAX
from ..solvers.second_order import Round
from .nvfp4_least_squares import codes_of

ZERO = 7
TOP = 2 * ZERO
SMALLEST = 2.0**-120


def rounder(step: Tensor) -> Round:
    """Return a function that writes the nearest of E2M1's values times `step` into its second argument."""
    divisor = step.clamp(min=SMALLEST)

    def round_into(values: Tensor, rounded: Tensor) -> None:
        y = values / divisor
        magnitude = y.abs().clamp_(max=E2M1_MAX)
        spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        magnitude.div_(spacing).round_().mul_(spacing)
        torch.copysign(magnitude, y, out=rounded).mul_(step)

    return round_into


def packed_codes(values: Tensor, step: Tensor) -> Tensor:
    """Return the codes, uint8 [N, K/2], of `values` [N, K]: E2M1 times the scales `step` [N, groups]."""
    grouped, divisor = values.unflatten(1, (step.shape[1], -1)), step.unsqueeze(-1)
    q = torch.where(divisor > 0, grouped / divisor.clamp(min=SMALLEST), 0.0).flatten(1)
    return pack_nibbles(codes_of(q.abs()) | ((q < 0).to(torch.uint8) << 3))


def levels_of(codes: Tensor) -> Tensor:
    """Return the levels, fp32 [N, K], of codes [N, K/2]."""
    nibbles = unpack_nibbles(codes)
    magnitude = (nibbles & 7).float()
    return torch.where(nibbles > 7, ZERO - magnitude, ZERO + magnitude)


def codes_of_levels(levels: Tensor) -> Tensor:
    """Return the codes, uint8 [N, K/2], of whole levels [N, K]."""
    signed = levels - ZERO
    return pack_nibbles(signed.abs().to(torch.uint8) | ((signed < 0).to(torch.uint8) << 3))


def positions(values: Tensor, step: Tensor) -> Tensor:
    """Return where `values` [N, K] lie among the levels under the scales `step` [N, groups], fp32 [N, K]."""
    grouped, divisor = values.unflatten(1, (step.shape[1], -1)), step.unsqueeze(-1)
    magnitude = torch.where(divisor > 0, grouped.abs() / divisor, 0.0).clamp(max=E2M1_MAX)
    # As codes are numbered: half a unit apart below 2, one below 4, then two.
    above_two = torch.where(magnitude < 4, magnitude + 2, magnitude * 0.5 + 4)
    code = torch.where(magnitude < 2, magnitude * 2, above_two)
    return (ZERO + torch.copysign(code, grouped)).flatten(1)


def values_of_levels(levels: Tensor, step: Tensor) -> Tensor:
    """Return the values of whole levels [N, K] under the scales `step` [N, groups], fp32 [N, K]."""
    signed = levels - ZERO
    code = signed.abs()
    above_two = torch.where(code < 6, code - 2, code * 2 - 8)
    magnitude = torch.where(code < 4, code * 0.5, above_two)
    grouped = torch.copysign(magnitude, signed).unflatten(1, (step.shape[1], -1))
    return (grouped * step.unsqueeze(-1)).flatten(1)
