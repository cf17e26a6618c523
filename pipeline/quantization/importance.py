"""How much each input of a linear layer matters, where a quantizer heeds it: its mean square on a text.

The model runs once more where a job is taken up again: it is not kept. `calibration.py` is what runs it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from .all_quantizers import QUANTIZERS
from .calibration import squared_inputs
from .input_scales import CalibrationText
from .quantizer import WeighingQuantizer
from .tasks import WeightTask

FLOOR = 1e-3
"""Of a layer's mean: an input that is never seen still counts a little."""


def find_importance(
    checkpoint: Checkpoint,
    tasks: Sequence[WeightTask],
    text: CalibrationText | None,
    device: torch.device,
    progress: bool,
) -> dict[str, Tensor]:
    """By module, fp32 [K] on the CPU, one on average; empty where there is no text or nothing heeds it."""
    if text is None:
        return {}
    linears = [
        task.linear
        for task in tasks
        if task.linear is not None
        and task.is_quantized
        and isinstance(QUANTIZERS[task.spec.name], WeighingQuantizer)
    ]
    if not linears:
        return {}
    sums = squared_inputs(checkpoint, linears, text.sequences, device, progress)
    return {module: _floored(total.cpu()) for module, total in sums.items()}


def _floored(total: Tensor) -> Tensor:
    mean = float(total.mean())
    return (total / mean).clamp(min=FLOOR).float() if mean else torch.ones_like(total, dtype=torch.float32)
