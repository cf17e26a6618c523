"""MXFP4's grid for `second_order.py`, and its levels for `learned_rounding.py`: E2M1 under a power of two."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ....layouts.formats.mxfp4 import GROUP_SIZE, MXFP4, NAN, MXFP4Weight, from_e8m0
from ..solvers.second_order import Curvature, Round, solve
from .e2m1 import TOP, codes_of_levels, levels_of, packed_codes, positions, rounder, values_of_levels
from .mxfp4_least_squares import LARGEST_EXPONENT_OF_A_CODE, OFFSETS
from .quantizer import QuantizedWeight

EXPONENT_BITS, MANTISSA_BITS = 0x7F800000, 23
SMALLEST, LARGEST = 2.0**-120, 2.0**120


@dataclass(frozen=True)
class MXFP4Grid:
    """MXFP4's grid. The grid's only parameter is the scale, a power of two; all grids are equal."""

    group_size = GROUP_SIZE
    candidates = len(OFFSETS)

    def first(self, target: Tensor, weight: Tensor) -> Tensor:
        return _around(_power_of_two(target.abs().amax(1)) * 2.0**-LARGEST_EXPONENT_OF_A_CODE)

    def near(self, parameters: Tensor) -> Tensor:
        return _around(parameters[0])

    def rescaled(self, parameters: Tensor, factor: Tensor) -> Tensor:
        return _power_of_two(parameters * factor * math.sqrt(2))

    def rounder(self, parameters: Tensor) -> Round:
        return rounder(parameters[0])


def second_order_mxfp4(weight: Tensor, spec: MXFP4, curvature: Curvature) -> QuantizedWeight:
    """Return `weight` [N, K] in MXFP4, the error of its layer's outputs kept small."""
    solution = solve(weight, curvature, MXFP4Grid())
    (step,) = solution.parameters
    scale = (step.view(torch.int32) >> MANTISSA_BITS).to(torch.uint8)
    quantized = MXFP4Weight(spec, packed_codes(solution.values, step), scale)
    return QuantizedWeight(quantized, *solution.distance_from(weight))


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


def _around(step: Tensor) -> Tensor:
    """Return `step` [rows] and the powers of two beside it [1, candidates, rows]."""
    steps = torch.stack([step * 2.0**offset for offset in OFFSETS])
    return steps.clamp(SMALLEST, LARGEST)[None]


def _power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is not above each positive number x; at least the smallest."""
    clamped = x.clamp(SMALLEST, LARGEST).contiguous()
    return (clamped.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
