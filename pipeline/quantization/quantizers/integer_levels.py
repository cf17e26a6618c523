"""Integer codes as levels for `learned_rounding.py`: each code from 0 to `top` is a level."""

from collections.abc import Callable

import torch
from torch import Tensor

from ....layouts.formats.int4 import Int4Weight, pack_nibbles, unpack_nibbles
from ....layouts.formats.int8 import Int8Weight
from ....layouts.formats.weight_format import Weight
from ..solvers.integer_least_squares import INT4_CODES, INT8_CODES, as_stored

Make = Callable[[Tensor, Tensor], Weight]
"""Makes a weight from levels [N, K], whole numbers in fp32, and scales [N, groups] as they are stored."""


class IntegerLevels:
    """The levels of a weight with integer zero points, which stay fixed."""

    def __init__(self, top: int, chosen: Tensor, scale: Tensor, zero: Tensor | int, make: Make):
        """chosen: fp32 [N, K]; scale: [N, groups]; zero: fp32 [N, groups, 1], or one for all"""
        self.top, self.chosen, self.groups = top, chosen, scale.shape[1]
        self._scale, self._stored_as, self._zero, self._make = scale.float(), scale.dtype, zero, make

    def positions(self, values: Tensor) -> Tensor:
        step = as_stored(self._scale, torch.float32, torch.finfo(torch.float32).tiny).unsqueeze(-1)
        grouped = values.unflatten(1, (self.groups, -1)) / step
        return (grouped + self._zero).clamp(0, self.top).flatten(1)

    def values(self, levels: Tensor, factors: Tensor) -> Tensor:
        centred = levels.unflatten(1, (self.groups, -1)) - self._zero
        return (centred * self._stored(factors).float().unsqueeze(-1)).flatten(1)

    def weight(self, levels: Tensor, factors: Tensor) -> Weight:
        return self._make(levels, self._stored(factors))

    def _stored(self, factors: Tensor) -> Tensor:
        return (self._scale * factors).to(self._stored_as)


def int4_levels(weight: Int4Weight) -> IntegerLevels:
    def make(levels: Tensor, scale: Tensor) -> Int4Weight:
        return Int4Weight(weight.spec, pack_nibbles(levels.to(torch.uint8)), scale, weight.zero_point)

    chosen, zero = unpack_nibbles(weight.codes).float(), weight.zero_point.float().unsqueeze(-1)
    return IntegerLevels(INT4_CODES.top, chosen, weight.scale, zero, make)


def int8_levels(weight: Int8Weight) -> IntegerLevels:
    middle = INT8_CODES.middle

    def make(levels: Tensor, scale: Tensor) -> Int8Weight:
        return Int8Weight(weight.spec, (levels - middle).to(torch.int8), scale)

    return IntegerLevels(INT8_CODES.top, weight.codes.float() + middle, weight.scale, middle, make)
