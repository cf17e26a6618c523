"""Carrying out one task of a plan: reading a weight a block of rows at a time, and solving or copying it.

Not for writing; `quantize.py` hands what comes out of here to the shard's writer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layouts.errors import UserError
from ...layouts.int4 import Int4Weight
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.float_source import FLOAT8, FLOATS, read_rows, scale_of
from ..checkpoints.safetensors_file import TensorInfo
from ..recipe import Recipe
from .int4_least_squares import Solved, quantize_int4
from .linear_weights import LinearWeight
from .torchao_hqq import quantize_int4_fractional

CPU_BLOCK, GPU_BLOCK = 1 << 24, 1 << 28
"""Weights read and solved together: besides its result, a task holds no more than fp32 copies of a block."""


@dataclass(frozen=True)
class WeightSolver:
    """How this job turns a float weight into an INT4 one, and where."""

    recipe: Recipe
    scale_dtype: torch.dtype
    device: torch.device

    def solve(self, checkpoint: Checkpoint, weight: LinearWeight, group_size: int) -> Solved:
        """Quantize one linear weight. UserError where it holds a NaN or an infinity."""
        block = CPU_BLOCK if self.device.type == "cpu" else GPU_BLOCK
        rows = max(1, block // weight.k)
        parts = []
        for start in range(0, weight.n, rows):
            values = read_linear(checkpoint, weight, start, min(start + rows, weight.n)).to(self.device)
            refuse_non_finite(checkpoint, weight.tensor, values)
            solved = self._solve_block(values, group_size)
            parts.append(Solved(solved.weight.to("cpu"), solved.squared_error, solved.squared_norm))
        return _stacked(parts, group_size)

    def _solve_block(self, values: Tensor, group_size: int) -> Solved:
        if self.recipe.zero_point == "fractional":
            return quantize_int4_fractional(values, group_size, self.scale_dtype)
        return quantize_int4(values, group_size, self.recipe.symmetric, self.scale_dtype)


def read_linear(checkpoint: Checkpoint, weight: LinearWeight, start: int, stop: int) -> Tensor:
    """Rows `start:stop` of a linear weight [N, K], wherever in its tensor they lie."""
    first = weight.rows[0] if weight.rows else 0
    if weight.transposed:
        slice_ = read_rows(checkpoint, weight.tensor, 0, weight.k, weight.expert)
        return slice_.T[first + start : first + stop].contiguous()
    return read_rows(checkpoint, weight.tensor, first + start, first + stop, weight.expert)


def read_kept(checkpoint: Checkpoint, info: TensorInfo) -> tuple[torch.dtype, Iterator[Tensor]]:
    """The dtype a copied tensor is written in, and its elements; FP8 becomes bf16, its scales go."""
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


def _stacked(parts: list[Solved], group_size: int) -> Solved:
    weights = [part.weight for part in parts]
    whole = weights[0]
    if len(weights) > 1:
        codes, scale, zero = (
            torch.cat([getattr(weight, name) for weight in weights])
            for name in ("codes", "scale", "zero_point")
        )
        whole = Int4Weight(codes, scale, zero, group_size)
    return Solved(whole, sum(part.squared_error for part in parts), sum(part.squared_norm for part in parts))
