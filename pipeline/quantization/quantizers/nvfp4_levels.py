"""NVFP4's levels for `learned_rounding.py`: E2M1's fifteen values in order, level 7 is zero."""

import torch
from torch import Tensor

from ....layouts.formats.int4 import pack_nibbles, unpack_nibbles
from ....layouts.formats.nvfp4 import E2M1_MAX, E4M3_MAX, NVFP4Weight

ZERO = 7


class NVFP4Levels:
    """The levels of a weight whose global scale stays fixed."""

    top = 2 * ZERO

    def __init__(self, weight: NVFP4Weight):
        nibbles = unpack_nibbles(weight.codes)
        magnitude = (nibbles & 7).float()
        self.chosen = torch.where(nibbles > 7, ZERO - magnitude, ZERO + magnitude)
        self._weight = weight
        self.groups = weight.scale.shape[1]

    def positions(self, values: Tensor) -> Tensor:
        step = (self._weight.scale.float() * self._weight.global_scale).unsqueeze(-1)
        grouped = values.unflatten(1, (self.groups, -1))
        magnitude = torch.where(step > 0, grouped.abs() / step, 0.0).clamp(max=E2M1_MAX)
        # As codes are numbered: half a unit apart below 2, one below 4, then two.
        above_two = torch.where(magnitude < 4, magnitude + 2, magnitude * 0.5 + 4)
        code = torch.where(magnitude < 2, magnitude * 2, above_two)
        return (ZERO + torch.copysign(code, grouped)).flatten(1)

    def values(self, levels: Tensor, factors: Tensor) -> Tensor:
        signed = levels - ZERO
        code = signed.abs()
        above_two = torch.where(code < 6, code - 2, code * 2 - 8)
        magnitude = torch.where(code < 4, code * 0.5, above_two)
        step = self._stored(factors).float() * self._weight.global_scale
        return (
            torch.copysign(magnitude, signed).unflatten(1, (self.groups, -1)) * step.unsqueeze(-1)
        ).flatten(1)

    def weight(self, levels: Tensor, factors: Tensor) -> NVFP4Weight:
        signed = levels - ZERO
        nibbles = signed.abs().to(torch.uint8) | ((signed < 0).to(torch.uint8) << 3)
        scale = self._stored(factors)
        return NVFP4Weight(self._weight.spec, pack_nibbles(nibbles), scale, self._weight.global_scale)

    def _stored(self, factors: Tensor) -> Tensor:
        return (self._weight.scale.float() * factors).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
