"""INT4's levels for `learned_rounding.py`: a level is a code, 0..15."""

import torch
from torch import Tensor

from ...layouts.formats.int4 import Int4Weight, pack_nibbles, unpack_nibbles
from .int4_least_squares import MAX_CODE


class Int4Levels:
    """Those of a weight with integer zero points, which stay as they are."""

    top = MAX_CODE

    def __init__(self, weight: Int4Weight):
        self.chosen = unpack_nibbles(weight.codes).float()
        self._weight = weight
        self._scale, self._zero = weight.scale.float(), weight.zero_point.float().unsqueeze(-1)
        self.groups = weight.scale.shape[1]

    def positions(self, values: Tensor) -> Tensor:
        step = self._scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        grouped = values.unflatten(1, (self.groups, -1)) / step
        return (grouped + self._zero).clamp(0, MAX_CODE).flatten(1)

    def values(self, levels: Tensor, factors: Tensor) -> Tensor:
        centred = levels.unflatten(1, (self.groups, -1)) - self._zero
        return (centred * self._stored(factors).float().unsqueeze(-1)).flatten(1)

    def weight(self, levels: Tensor, factors: Tensor) -> Int4Weight:
        codes = pack_nibbles(levels.to(torch.uint8))
        return Int4Weight(self._weight.spec, codes, self._stored(factors), self._weight.zero_point)

    def _stored(self, factors: Tensor) -> Tensor:
        return (self._scale * factors).to(self._weight.scale.dtype)
