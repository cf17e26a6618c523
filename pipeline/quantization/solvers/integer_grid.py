"""The grid of integer codes for `second_order.py`: scales and zero points, exact as they are stored."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .integer_least_squares import IntegerCodes, as_stored
from .second_order import Round

RATIOS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.74)
"""Candidate scales relative to the scale that clips nothing. They are tried without feedback at first."""
SCALES_NEAR = (1.0, 0.97, 1.03, 0.94, 1.06)
SMALLEST = 2.0**-100


@dataclass(frozen=True)
class IntegerGrid:
    """The values are `(code - zero) * scale`, with codes 0..top; the parameters are scale and zero."""

    codes: IntegerCodes
    group_size: int
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def zero_offsets(self) -> tuple[int, ...]:
        return (0,) if self.symmetric else (0, -1, 1)

    @property
    def candidates(self) -> int:
        return len(SCALES_NEAR) + len(self.zero_offsets) - 1

    def first(self, target: Tensor, weight: Tensor) -> Tensor:
        """Return the neighbours of the least-squares solution, which rounds each weight by itself."""
        top, middle = self.codes.top, self.codes.middle
        low, high = target.amin(1).clamp(max=0), target.amax(1).clamp(min=0)
        if self.symmetric:
            fixed = torch.full_like(low, middle)
            starts = [
                (self.codes.widest(low, high, sign).clamp(min=SMALLEST) * sign, fixed)
                for sign in self.codes.signs
            ]
        else:
            widest = ((high - low) / top).clamp(min=SMALLEST)
            nearest = (-low / widest).round()
            starts = [(widest, (nearest + offset).clamp(0, top)) for offset in self.zero_offsets]
        scale, zero = starts[0]
        best = torch.full_like(scale, -torch.inf)
        for widest, z in starts:
            for ratio in RATIOS:
                d = (target / (widest * ratio)[:, None]).round()
                d = torch.clamp(d, -z[:, None], top - z[:, None])
                counted = d * weight
                dot = (target * counted).sum(1)
                refined = dot / (d * counted).sum(1).clamp(min=SMALLEST)
                explained = refined * dot
                better = (explained > best) & (refined * widest > 0)
                best = torch.where(better, explained, best)
                scale, zero = torch.where(better, refined, scale), torch.where(better, z, zero)
        return self.near(torch.stack([self._stored(scale), zero]))

    def near(self, parameters: Tensor) -> Tensor:
        scale, zero = parameters
        scaled = [torch.stack([self._stored(scale * ratio), zero]) for ratio in SCALES_NEAR]
        moved = [
            torch.stack([scale, (zero + offset).clamp(0, self.codes.top)])
            for offset in self.zero_offsets
            if offset
        ]
        return torch.stack(scaled + moved, 1)

    def rescaled(self, parameters: Tensor, factor: Tensor) -> Tensor:
        scale, zero = parameters
        return torch.stack([self._stored(scale * factor), zero])

    def rounder(self, parameters: Tensor) -> Round:
        scale, zero = parameters
        low, high = -zero, self.codes.top - zero

        def round_into(values: Tensor, rounded: Tensor) -> None:
            torch.div(values, scale, out=rounded).round_()
            torch.clamp(rounded, low, high, out=rounded).mul_(scale)

        return round_into

    def _stored(self, scale: Tensor) -> Tensor:
        return as_stored(scale, self.scale_dtype, SMALLEST)
