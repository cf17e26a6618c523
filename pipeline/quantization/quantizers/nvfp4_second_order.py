"""NVFP4's grid for `second_order.py`: E2M1 codes under an E4M3 scale and a given global scale."""

import torch
from torch import Tensor

from ....layouts.formats.nvfp4 import E2M1_MAX, E4M3_MAX, GROUP_SIZE, NVFP4, NVFP4Weight
from ..solvers.second_order import Curvature, Round, solve
from .e2m1 import packed_codes, rounder
from .nvfp4_least_squares import CODES_ABOVE, CODES_BELOW, LARGEST_E4M3
from .quantizer import QuantizedWeight


class NVFP4Grid:
    """NVFP4's grid. The grid's only parameter is the value of a code of 1: the E4M3 scale times the global
    scale.
    """

    group_size = GROUP_SIZE
    offsets = sorted(range(-CODES_BELOW, CODES_ABOVE + 1), key=abs)
    """Offsets from the E4M3 code that makes the largest weight 6, the same as in the data-free solver."""
    candidates = len(offsets)

    def __init__(self, global_scale: Tensor):
        self.global_scale = global_scale

    def first(self, target: Tensor, weight: Tensor) -> Tensor:
        return self._around(target.abs().amax(1) / E2M1_MAX)

    def near(self, parameters: Tensor) -> Tensor:
        return self._around(parameters[0])

    def rescaled(self, parameters: Tensor, factor: Tensor) -> Tensor:
        return self._bytes(parameters[0] * factor).view(torch.float8_e4m3fn).float()[None] * self.global_scale

    def rounder(self, parameters: Tensor) -> Round:
        return rounder(parameters[0])

    def _around(self, step: Tensor) -> Tensor:
        first = self._bytes(step).to(torch.int16)
        codes = [(first + offset).clamp(0, LARGEST_E4M3).to(torch.uint8) for offset in self.offsets]
        return torch.stack(codes).view(torch.float8_e4m3fn).float()[None] * self.global_scale

    def _bytes(self, step: Tensor) -> Tensor:
        return (step / self.global_scale).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def second_order_nvfp4(
    weight: Tensor, spec: NVFP4, global_scale: Tensor, curvature: Curvature
) -> QuantizedWeight:
    """Return `weight` [N, K] in NVFP4 under `global_scale`, the error of its layer's outputs kept small."""
    solution = solve(weight, curvature, NVFP4Grid(global_scale))
    (step,) = solution.parameters
    scale = (step / global_scale).to(torch.float8_e4m3fn)
    quantized = NVFP4Weight(spec, packed_codes(solution.values, step), scale, global_scale)
    return QuantizedWeight(quantized, *solution.distance_from(weight))
