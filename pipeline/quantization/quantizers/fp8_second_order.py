"""E4M3's grid for `second_order.py`, and its levels for `learned_rounding.py`, under fixed scales.

Under any scale E4M3 has the same precision, so the scales of the data-free solver stay: a row is divided by
its scale and rounded to E4M3 itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....layouts.formats.e4m3 import E4M3, E4M3_MAX
from ....layouts.formats.fp8 import FP8Weight
from ..solvers.second_order import Curvature, Round, solve
from .fp8_least_squares import SMALLEST_NORMAL, nearest_e4m3
from .quantizer import QuantizedWeight

COLUMNS = 16
"""How many columns are solved together. They share no numbers, so any divisor of K would do."""
LARGEST_CODE = 0x7E
OF_AN_OCTAVE, SMALLEST_EXPONENT = 8, -6


@dataclass(frozen=True)
class E4M3Grid:
    """E4M3's values; there are no parameters to choose."""

    group_size = COLUMNS
    candidates = 1

    def first(self, target: Tensor, weight: Tensor) -> Tensor:
        return target.new_ones(1, 1, len(target))

    def near(self, parameters: Tensor) -> Tensor:
        return parameters[:, None]

    def rescaled(self, parameters: Tensor, factor: Tensor) -> Tensor:
        return parameters

    def rounder(self, parameters: Tensor) -> Round:
        def round_into(values: Tensor, rounded: Tensor) -> None:
            rounded.copy_(nearest_e4m3(values, parameters[0]))

        return round_into


def second_order_fp8(weight: Tensor, found: FP8Weight, curvature: Curvature) -> QuantizedWeight:
    """Return `weight` [N, K] under the scales of `found`, the error of its layer's outputs kept small."""
    scale = found.scale.float()
    solution = solve(weight.float() / scale, curvature, E4M3Grid())
    original = weight.float()
    error = (solution.values * scale - original).square().sum(1).sum(dtype=torch.float64)
    norm = original.square().sum(1).sum(dtype=torch.float64)
    quantized = FP8Weight(found.spec, solution.values.to(E4M3), found.scale)
    return QuantizedWeight(quantized, float(error), float(norm))


class FP8Levels:
    """The levels of a weight whose scales stay: E4M3's 253 values in order."""

    top = 2 * LARGEST_CODE

    def __init__(self, weight: FP8Weight):
        self.groups = 1
        self._weight = weight
        bits = weight.codes.view(torch.uint8)
        magnitude = (bits & 0x7F).float()
        self.chosen = torch.where(bits > 0x7F, LARGEST_CODE - magnitude, LARGEST_CODE + magnitude)

    def positions(self, values: Tensor) -> Tensor:
        y = values / self._weight.scale.float()
        magnitude = y.abs().clamp(max=E4M3_MAX)
        exponent = magnitude.clamp(min=SMALLEST_NORMAL).log2().floor()
        # As codes are numbered: eight to an octave, and eight below the smallest normal number.
        code = (exponent - SMALLEST_EXPONENT + magnitude / exponent.exp2()) * OF_AN_OCTAVE
        return LARGEST_CODE + torch.copysign(code, y)

    def values(self, levels: Tensor, factors: Tensor) -> Tensor:
        return _numbers(levels).float() * self._weight.scale.float()

    def weight(self, levels: Tensor, factors: Tensor) -> FP8Weight:
        return FP8Weight(self._weight.spec, _numbers(levels), self._weight.scale)


def _numbers(levels: Tensor) -> Tensor:
    """Return the E4M3 numbers of whole levels."""
    signed = levels - LARGEST_CODE
    bits = signed.abs().to(torch.uint8) | ((signed < 0).to(torch.uint8) << 7)
    return bits.view(E4M3)
