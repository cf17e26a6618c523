"""INT4's grid for `second_order.py`: scales and integer zero points, exact as they are stored."""

import torch
from torch import Tensor

from ...layouts.formats.int4 import SYMMETRIC_ZERO, Int4, Int4Weight, pack_nibbles
from .int4_least_squares import MAX_CODE
from .quantizer import Quantized
from .second_order import Curvature, Round, solve

RATIOS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.74)
"""Of the scale that clips nothing: tried one column at a time, to find where to look with feedback."""
SCALES_NEAR = (1.0, 0.97, 1.03, 0.94, 1.06)
SMALLEST = 2.0**-100


class Int4Grid:
    """`(code - zero) * scale`, codes 0..15; its parameters are scale and zero."""

    def __init__(self, spec: Int4, scale_dtype: torch.dtype):
        self.group_size, self.symmetric, self.scale_dtype = spec.group_size, spec.symmetric, scale_dtype
        self.zero_offsets = (0,) if spec.symmetric else (0, -1, 1)
        self.candidates = len(SCALES_NEAR) + len(self.zero_offsets) - 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Int4Grid) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[int, bool, torch.dtype]:
        return self.group_size, self.symmetric, self.scale_dtype

    def first(self, target: Tensor, weight: Tensor) -> Tensor:
        """The neighbours of the best by least squares, each weight by itself (`int4_least_squares.py`)."""
        low, high = target.amin(1).clamp(max=0), target.amax(1).clamp(min=0)
        if self.symmetric:
            widest = torch.maximum(high / (MAX_CODE - SYMMETRIC_ZERO), low / -SYMMETRIC_ZERO)
            nearest = torch.full_like(widest, SYMMETRIC_ZERO)
        else:
            widest = (high - low) / MAX_CODE
            nearest = (-low / widest.clamp(min=SMALLEST)).round()
        widest = widest.clamp(min=SMALLEST)
        best = torch.full_like(widest, -torch.inf)
        scale, zero = widest, nearest.clamp(0, MAX_CODE)
        for offset in self.zero_offsets:
            z = (nearest + offset).clamp(0, MAX_CODE)
            for ratio in RATIOS:
                d = (target / (widest * ratio)[:, None]).round()
                d = torch.clamp(d, -z[:, None], MAX_CODE - z[:, None])
                counted = d * weight
                dot = (target * counted).sum(1)
                refined = dot / (d * counted).sum(1).clamp(min=SMALLEST)
                explained = refined * dot
                better = (explained > best) & (refined > 0)
                best = torch.where(better, explained, best)
                scale, zero = torch.where(better, refined, scale), torch.where(better, z, zero)
        return self.near(torch.stack([self._stored(scale), zero]))

    def near(self, parameters: Tensor) -> Tensor:
        scale, zero = parameters
        scaled = [torch.stack([self._stored(scale * ratio), zero]) for ratio in SCALES_NEAR]
        moved = [
            torch.stack([scale, (zero + offset).clamp(0, MAX_CODE)]) for offset in self.zero_offsets if offset
        ]
        return torch.stack(scaled + moved, 1)

    def rescaled(self, parameters: Tensor, factor: Tensor) -> Tensor:
        scale, zero = parameters
        return torch.stack([self._stored(scale * factor), zero])

    def rounder(self, parameters: Tensor) -> Round:
        scale, zero = parameters
        low, high = -zero, MAX_CODE - zero

        def round_into(values: Tensor, rounded: Tensor) -> None:
            torch.div(values, scale, out=rounded).round_()
            torch.clamp(rounded, low, high, out=rounded).mul_(scale)

        return round_into

    def _stored(self, scale: Tensor) -> Tensor:
        return scale.to(self.scale_dtype).float().clamp(min=SMALLEST)


def second_order_int4(
    weight: Tensor, spec: Int4, scale_dtype: torch.dtype, curvature: Curvature
) -> Quantized:
    """`weight` [N, K] in INT4 with integer zero points, the error of its layer's outputs kept small."""
    solution = solve(weight, curvature, Int4Grid(spec, scale_dtype))
    scale, zero = solution.parameters
    n, k = weight.shape
    grouped = solution.values.view(n, -1, spec.group_size)
    codes = (grouped / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)
    packed = pack_nibbles(codes.to(torch.uint8).view(n, k))
    quantized = Int4Weight(spec, packed, scale.to(scale_dtype), zero.to(torch.uint8))
    return Quantized(quantized, *solution.distance_from(weight))
