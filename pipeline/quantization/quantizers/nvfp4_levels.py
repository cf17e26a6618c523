"""NVFP4's levels for `learned_rounding.py`: E2M1's values under an E4M3 scale and a fixed global scale."""

import torch
from torch import Tensor

from ....layouts.formats.nvfp4 import E4M3_MAX, NVFP4Weight
from .e2m1 import TOP, codes_of_levels, levels_of, positions, values_of_levels


class NVFP4Levels:
    """The levels of a weight whose global scale stays fixed."""

    top = TOP

    def __init__(self, weight: NVFP4Weight):
        self.chosen = levels_of(weight.codes)
        self._weight = weight
        self.groups = weight.scale.shape[1]

    def positions(self, values: Tensor) -> Tensor:
        return positions(values, self._step(self._weight.scale))

    def values(self, levels: Tensor, factors: Tensor) -> Tensor:
        return values_of_levels(levels, self._step(self._stored(factors)))

    def weight(self, levels: Tensor, factors: Tensor) -> NVFP4Weight:
        scale, whole = self._stored(factors), self._weight.global_scale
        return NVFP4Weight(self._weight.spec, codes_of_levels(levels), scale, whole)

    def _step(self, scale: Tensor) -> Tensor:
        return scale.float() * self._weight.global_scale

    def _stored(self, factors: Tensor) -> Tensor:
        return (self._weight.scale.float() * factors).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
