"""Carries out one task: reads a weight a block of rows at a time, and quantizes or copies it.

Writing is left to `write_shards.py`, which hands the tensors to the shard's writer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....base.errors import UserError
from ....layouts.formats.weight_format import WeightFormat, merge_rows, rows_together
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.float_source import FLOAT8, FLOATS, read_rows, scale_of
from ...checkpoints.safetensors_file import TensorInfo
from ...model_loader.linear_weights import ExpertBias, LinearWeight
from ..quantizers.all_quantizers import QUANTIZERS
from ..quantizers.quantizer import QuantizedWeight, SharingQuantizer, WeighingQuantizer
from ..solvers.importance import importance_of_columns

CPU_BLOCK, GPU_BLOCK = 1 << 24, 1 << 28
"""How many weights are quantized together: besides its result, a task holds only fp32 copies of such a
block."""


@dataclass(frozen=True)
class WeightQuantizer:
    """The device and settings with which this job quantizes a weight."""

    scale_dtype: torch.dtype
    device: torch.device
    importance: Mapping[str, Tensor] = field(default_factory=dict)
    """The importance of each input of a module, fp32 [K], from a text; without one it follows from the
    weights."""

    def quantize(
        self, checkpoint: Checkpoint, linear: LinearWeight, spec: WeightFormat, shared: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        """Quantize one linear weight. Raise UserError if the weight holds a NaN or an infinity."""
        quantizer = QUANTIZERS[spec.name]
        here = {name: tensor.to(self.device) for name, tensor in shared.items()}
        parts = []
        importance = self.importance.get(linear.module)
        if importance is None and isinstance(quantizer, WeighingQuantizer):
            importance = importance_of_columns(self._blocks(checkpoint, linear))
        for values in self._blocks(checkpoint, linear, rows_together(spec)):
            if importance is not None and isinstance(quantizer, WeighingQuantizer):
                part = quantizer.quantize_weighted(values, spec, importance.to(self.device))
            else:
                part = quantizer.quantize(values, spec, self.scale_dtype, here)
            parts.append(QuantizedWeight(part.weight.to("cpu"), part.squared_error, part.squared_norm))
        return _merged(parts)

    def measure(self, checkpoint: Checkpoint, linear: LinearWeight, quantizer: SharingQuantizer) -> float:
        """Return the measurement that decides the tensors that `linear` shares. Raise UserError if a weight
        holds a NaN or an infinity.
        """
        return max(quantizer.measure(values) for values in self._blocks(checkpoint, linear))

    def _blocks(self, checkpoint: Checkpoint, linear: LinearWeight, together: int = 1) -> Iterator[Tensor]:
        """Yield blocks of rows of a weight. together: a divisor of every block's number of rows except the
        last one's"""
        rows = (CPU_BLOCK if self.device.type == "cpu" else GPU_BLOCK) // linear.k
        rows = max(together, rows // together * together)
        for start in range(0, linear.n, rows):
            values = read_linear(checkpoint, linear, start, min(start + rows, linear.n)).to(self.device)
            refuse_non_finite(checkpoint, linear.tensor, values)
            yield values


def read_linear(checkpoint: Checkpoint, weight: LinearWeight, start: int, stop: int) -> Tensor:
    """Return rows `start:stop` of a linear weight [N, K], wherever in its tensor they lie."""
    if weight.transposed:
        slice_ = read_rows(checkpoint, weight.tensor, 0, weight.k, weight.expert)
        return slice_.T[weight.row_slice][start:stop].contiguous()
    first, step = weight.row_slice.start, weight.step
    rows = read_rows(
        checkpoint, weight.tensor, first + step * start, first + step * (stop - 1) + 1, weight.expert
    )
    return rows[::step].contiguous()


def read_bias(checkpoint: Checkpoint, bias: ExpertBias) -> Tensor:
    """Return one expert's bias [N], from the tensor of all biases."""
    row = checkpoint.tensors[bias.tensor].read_rows(bias.expert, bias.expert + 1)[0]
    values = row[bias.rows].contiguous()
    refuse_non_finite(checkpoint, bias.tensor, values)
    return values


def read_kept(checkpoint: Checkpoint, info: TensorInfo) -> tuple[torch.dtype, Iterator[Tensor]]:
    """Return the dtype in which a copied tensor is written, and its elements; FP8 becomes bf16, without
    scales.
    """
    if info.dtype in FLOAT8 and scale_of(checkpoint, info.name) is not None:
        return torch.bfloat16, _dequantized_chunks(checkpoint, info)
    return info.dtype, _checked_chunks(checkpoint, info)


def _dequantized_chunks(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Tensor]:
    experts: list[int | None] = list(range(info.shape[0])) if len(info.shape) == 3 else [None]
    n, k = info.shape[-2:]
    rows = max(1, CPU_BLOCK // k)
    for expert in experts:
        for start in range(0, n, rows):
            values = read_rows(checkpoint, info.name, start, min(start + rows, n), expert)
            refuse_non_finite(checkpoint, info.name, values)
            yield values.to(torch.bfloat16).reshape(-1)


def _checked_chunks(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Tensor]:
    for chunk in info.read_chunks():
        if info.dtype in FLOATS:
            refuse_non_finite(checkpoint, info.name, chunk)
        yield chunk


def refuse_non_finite(checkpoint: Checkpoint, name: str, values: Tensor) -> None:
    if bool(torch.isfinite(values).all()):
        return
    nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
    raise UserError(
        f"{checkpoint.source}: tensor {name} ({checkpoint.tensors[name].file.name}) holds {nans} NaN and "
        f"{infinities} infinite values; the checkpoint is damaged or was saved from a diverged run"
    )


def _merged(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Join the blocks of rows of a quantized weight."""
    weight = parts[0].weight if len(parts) == 1 else merge_rows([part.weight for part in parts])
    if weight is None:
        raise ValueError(f"blocks of rows in {parts[0].weight.spec.label} cannot be put together")
    return QuantizedWeight(
        weight, sum(part.squared_error for part in parts), sum(part.squared_norm for part in parts)
    )
