"""INT8 rounded by `second_order.py`, on the grid of integer codes."""

import torch
from torch import Tensor

from ....layouts.formats.int8 import Int8, Int8Weight
from ..solvers.integer_grid import IntegerGrid
from ..solvers.integer_least_squares import INT8_CODES
from ..solvers.second_order import Curvature, solve
from .quantizer import QuantizedWeight


def second_order_int8(
    weight: Tensor, spec: Int8, scale_dtype: torch.dtype, curvature: Curvature
) -> QuantizedWeight:
    """Return `weight` [N, K] in INT8, the error of its layer's outputs kept small."""
    solution = solve(weight, curvature, IntegerGrid(INT8_CODES, spec.group_size, True, scale_dtype))
    scale = solution.parameters[0]
    grouped = solution.values.view(*scale.shape, -1)
    codes = (grouped / scale.unsqueeze(-1)).round().to(torch.int8).view(weight.shape)
    quantized = Int8Weight(spec, codes, scale.to(scale_dtype))
    return QuantizedWeight(quantized, *solution.distance_from(weight))
