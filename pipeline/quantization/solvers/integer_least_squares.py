"""Our solver for integer codes: for each group, the scale and the zero point with the least squared error.

The solver takes HQQ's idea (alternate between codes and parameters, no calibration data), restricted to
numbers that engines can store: the zero is an integer and the scale is rounded to its stored dtype inside the
search. It reads no file.

For a group x of g weights, zero z and scale s, the best codes are `d = clamp(round(x/s), -z, top-z)`, for
which the best scale is `<x,d>/<d,d>`, which leaves the error `<x,x> - <x,d>²/<d,d>`. One pass over x
therefore judges a candidate (s, z) with the scale already refined. The search takes every clipping ratio at
the nearest zero and its neighbours, then alternates from the best with the scale as it will be stored.

Without zero points the codes -8..7 reach one step further on one side, and a negative scale turns that side
around. Intel's AutoRound publishes symmetric INT4 of this kind, and engines multiply by the scale whatever
its sign. The search tries both signs; this gains most of what zero points would gain.

Groups lie along the last dimension and elements along the first ([g, groups]); a sum adds one half of the
numbers to the other, again and again. Only single IEEE operations in a fixed order touch a number, so the
bits do not depend on threads, chunks or the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .column_sums import fold

ZERO_OFFSETS = (0, -1, 1)
REFINEMENTS = 4


@dataclass(frozen=True)
class IntegerCodes:
    """The integer codes of a format, 0..top.

    middle: the zero point of symmetric weights
    ratios: candidate scales for each group, relative to the scale that clips nothing
    signs:  the signs that the scale of symmetric weights may have
    """

    top: int
    middle: int
    ratios: tuple[float, ...]
    signs: tuple[int, ...] = (1,)

    def widest(self, low: Tensor, high: Tensor, sign: int) -> Tensor:
        """Return the magnitude that clips nothing of low..high without zero points, for one sign of the
        scale.
        """
        below, above = (low, high) if sign > 0 else (-high, -low)
        return torch.maximum(above * (1 / (self.top - self.middle)), below * (-1 / self.middle))


INT4_CODES = IntegerCodes(15, 8, tuple(1.08 - 0.04 * i for i in range(10)), (1, -1))
INT8_CODES = IntegerCodes(255, 128, (1.0, 0.98, 0.95, 0.92))
"""8 bits hardly need a search: clipping the largest of g weights by a share c of it costs (127 c)² squared
steps and saves c g / 6, so the best c is 0.0007 for a group of 128, and 0.02 to 0.06 for a whole row."""


def search(
    x: Tensor, codes: IntegerCodes, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the scale (fp32, exactly representable in `scale_dtype`) and zero of each column of x [g,
    groups].
    """
    smallest = max(torch.finfo(scale_dtype).smallest_normal * 2.0**-10, 2.0**-120)
    low, high = x.amin(0).clamp_(max=0), x.amax(0).clamp_(min=0)
    if symmetric:
        middle = torch.full_like(low, codes.middle)
        starts = [
            (codes.widest(low, high, sign).clamp_(min=smallest).mul_(sign), middle) for sign in codes.signs
        ]
    else:
        widest = ((high - low) * (1 / codes.top)).clamp_(min=smallest)
        nearest = torch.round(-low / widest)
        starts = [(widest, (nearest + offset).clamp_(0, codes.top)) for offset in ZERO_OFFSETS]
    scratch = torch.empty_like(x), torch.empty_like(x)

    scale, zero = (start.clone() for start in starts[0])
    best = torch.zeros_like(scale)
    for widest, candidate in starts:
        for ratio in codes.ratios:
            dot, square = _products(x, widest * ratio, candidate, codes, scratch)
            refined = dot / square.clamp_(min=smallest)
            explained = refined * dot
            better = (explained > best) & (refined * widest > 0)
            best = torch.where(better, explained, best)
            scale = torch.where(better, refined, scale)
            zero = torch.where(better, candidate, zero)

    best = torch.full_like(scale, -torch.inf)
    stored = scale
    for _ in range(REFINEMENTS):
        scale = as_stored(scale, scale_dtype, smallest)
        dot, square = _products(x, scale, zero, codes, scratch)
        explained = scale * (2 * dot - scale * square)
        better = explained > best
        best = torch.where(better, explained, best)
        stored = torch.where(better, scale, stored)
        scale = torch.where(square > 0, dot / square.clamp_(min=smallest), scale)
    empty = (low == 0) & (high == 0)
    unit, centre = torch.ones_like(stored), torch.full_like(zero, codes.middle)
    return torch.where(empty, unit, stored), torch.where(empty, centre, zero)


def as_stored(scale: Tensor, dtype: torch.dtype, smallest: float) -> Tensor:
    """Return fp32 scales rounded to `dtype`, none of them nearer to zero than `smallest`."""
    return torch.copysign(scale.to(dtype).float().abs().clamp_(min=smallest), scale)


def centred_codes(
    x: Tensor, scale: Tensor, zero: Tensor, codes: IntegerCodes, out: Tensor | None = None
) -> Tensor:
    """Return `code - zero` for every weight, in fp32."""
    out = torch.mul(x, 1.0 / scale, out=out)
    return torch.clamp(out.round_(), -zero, codes.top - zero, out=out)


def _products(
    x: Tensor, scale: Tensor, zero: Tensor, codes: IntegerCodes, scratch: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return `<x, d>` and `<d, d>` of each column, d being its centred codes."""
    centred, products = scratch
    d = centred_codes(x, scale, zero, codes, out=centred)
    dot = fold(torch.mul(x, d, out=products))
    return dot, fold(d.mul_(d))
