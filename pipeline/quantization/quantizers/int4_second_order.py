"""INT4 rounded by `second_order.py`, on the grid of integer codes."""

import torch
from torch import Tensor

from ....layouts.formats.int4 import Int4, Int4Weight, pack_nibbles
from ..solvers.integer_grid import IntegerGrid
from ..solvers.integer_least_squares import INT4_CODES
from ..solvers.second_order import Curvature, solve
from .quantizer import QuantizedWeight


def second_order_int4(
    weight: Tensor, spec: Int4, scale_dtype: torch.dtype, curvature: Curvature
) -> QuantizedWeight:
    """Return `weight` [N, K] in INT4 with integer zero points, the error of its layer's outputs kept
    small.
    """
    grid = IntegerGrid(INT4_CODES, spec.group_size, spec.symmetric, scale_dtype)
    solution = solve(weight, curvature, grid)
    scale, zero = solution.parameters
    n, k = weight.shape
    grouped = solution.values.view(n, -1, spec.group_size)
    codes = (grouped / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)
    packed = pack_nibbles(codes.to(torch.uint8).view(n, k))
    quantized = Int4Weight(spec, packed, scale.to(scale_dtype), zero.to(torch.uint8))
    return QuantizedWeight(quantized, *solution.distance_from(weight))
