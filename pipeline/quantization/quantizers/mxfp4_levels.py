"""MXFP4's levels for `learned_rounding.py`: E2M1's values under a power of two."""

import torch
from torch import Tensor

from ....layouts.formats.mxfp4 import NAN, MXFP4Weight, from_e8m0
from .e2m1 import SMALLEST, TOP, codes_of_levels, levels_of, positions, values_of_levels


class MXFP4Levels:
    """The levels of a weight. A factor changes a scale once it is nearer to another power of two."""

    top = TOP

    def __init__(self, weight: MXFP4Weight):
        self.chosen = levels_of(weight.codes)
        self._weight = weight
        self.groups = weight.scale.shape[1]

    def positions(self, values: Tensor) -> Tensor:
        return positions(values, from_e8m0(self._weight.scale))

    def values(self, levels: Tensor, factors: Tensor) -> Tensor:
        return values_of_levels(levels, from_e8m0(self._stored(factors)))

    def weight(self, levels: Tensor, factors: Tensor) -> MXFP4Weight:
        return MXFP4Weight(self._weight.spec, codes_of_levels(levels), self._stored(factors))

    def _stored(self, factors: Tensor) -> Tensor:
        exponent = self._weight.scale + factors.clamp(min=SMALLEST).log2().round()
        return exponent.clamp(0, NAN - 1).to(torch.uint8)
