"""How much each input of a linear layer matters, from a text or from the weights alone.

On a text, an input's importance is its mean square, as `calibration.py` finds it. With no text, an input's
importance is one over the root mean square of its column: columns are small where inputs are large, as weight
decay leaves them.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .column_sums import fold

FLOOR = 1e-3
"""The least importance of an input, as a share of the layer's mean: an unseen input still counts a little."""


def importance_of(squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the importance of each module's inputs, fp32 [K], 1 on average. squares: the inputs' sums of
    squares, float64 [K]."""
    return {module: _floored(total) for module, total in squares.items()}


def importance_of_columns(blocks: Iterable[Tensor]) -> Tensor:
    """Return the importance of inputs, fp32 [K], 1 on average, from blocks of a weight's rows [rows, K] on
    any device."""
    squares = fold(torch.stack([fold(block.float().square()).cpu() for block in blocks]))
    return _floored(squares.clamp(min=FLOOR * float(squares.mean())).rsqrt())


def _floored(total: Tensor) -> Tensor:
    mean = float(total.mean())
    uniform = mean == 0 or not math.isfinite(mean)
    return torch.ones_like(total).float() if uniform else (total / mean).clamp(min=FLOOR).float()
