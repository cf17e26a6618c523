"""How much each input of a linear layer matters, from a text or from the weights alone.

On a text it is the input's mean square, as `calibration.py` finds it. With no text it is one over the root
mean square of the input's column: columns are small where inputs are large, as weight decay leaves them.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .column_sums import fold

FLOOR = 1e-3
"""Of a layer's mean: an input that is never seen still counts a little."""


def importance_of(squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By module, fp32 [K], one on average; squares: the sums of squares of its inputs, float64 [K]."""
    return {module: _floored(total) for module, total in squares.items()}


def importance_of_columns(blocks: Iterable[Tensor]) -> Tensor:
    """fp32 [K], one on average, from a weight's rows, some [rows, K] at a time and on any device."""
    squares = fold(torch.stack([fold(block.float().square()).cpu() for block in blocks]))
    return _floored(squares.clamp(min=FLOOR * float(squares.mean())).rsqrt())


def _floored(total: Tensor) -> Tensor:
    mean = float(total.mean())
    uniform = mean == 0 or not math.isfinite(mean)
    return torch.ones_like(total).float() if uniform else (total / mean).clamp(min=FLOOR).float()
