"""Reading the rows of a checkpoint's float weights: BF16, FP16, FP32, and FP8 with its scales multiplied in.

INT4 and NVFP4 sources are refused: quantized weights are not quantized again.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from .checkpoint import Checkpoint
from .decoded_tensors import as_matrix
from .safetensors_file import TensorInfo

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Suffixes of scales, both multipliers: DeepSeek's and Qwen's for blocks, everybody's for tensors and
channels."""
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".input_scale_ub")


def is_float(info: TensorInfo) -> bool:
    return info.dtype in FLOATS or info.dtype in FLOAT8


def scale_of(checkpoint: Checkpoint, name: str) -> TensorInfo | None:
    """Return the tensor that scales the FP8 tensor `name`; None for any other dtype."""
    if checkpoint.tensors[name].dtype not in FLOAT8:
        return None
    for suffix in SCALE_SUFFIXES:
        if name + suffix in checkpoint.tensors:
            return checkpoint.tensors[name + suffix]
    raise UserError(
        f"{checkpoint.source}: {name} is FP8 and has neither {name}_scale_inv nor {name}_scale; "
        "download or copy the checkpoint again"
    )


def is_scale(checkpoint: Checkpoint, name: str) -> bool:
    """Say whether `name` only scales an FP8 weight or its input: such a tensor is dropped with the FP8
    weight.
    """
    for suffix in SCALE_SUFFIXES:
        weight = checkpoint.tensors.get(name.removesuffix(suffix))
        if name.endswith(suffix) and weight is not None and weight.dtype in FLOAT8:
            return True
    for suffix in ACTIVATION_SCALES:
        weight = checkpoint.tensors.get(name.removesuffix(suffix) + ".weight")
        if name.endswith(suffix) and weight is not None and weight.dtype in FLOAT8:
            return True
    return False


def names_of_float8(checkpoint: Checkpoint, name: str) -> list[str]:
    """Return the FP8 tensor `name` and the tensors that scale it or its input."""
    stem = name.removesuffix(".weight")
    scales = [*(name + suffix for suffix in SCALE_SUFFIXES), *(stem + suffix for suffix in ACTIVATION_SCALES)]
    return [name, *(scale for scale in scales if scale in checkpoint.tensors)]


def describe_float8(checkpoint: Checkpoint, name: str) -> str:
    """Return `FP8, blocks of 128x128`; UserError if the scale is absent or misshapen."""
    scale = scale_of(checkpoint, name)
    if scale is None:
        raise ValueError(f"{name} is not FP8")
    info = checkpoint.tensors[name]
    n, k = _scale_blocks(checkpoint, info, scale)
    if k < info.shape[-1] or n not in (1, info.shape[-2]):
        return f"FP8, blocks of {n}x{k}"
    return "FP8, a scale a row" if n == 1 else "FP8, one scale"


def refuse_unreadable(checkpoint: Checkpoint, name: str) -> None:
    """Raise UserError if `name` is not a float tensor, or is FP8 without a scale or with a scale of an
    unexpected shape.
    """
    info = checkpoint.tensors[name]
    if not is_float(info):
        dtype = str(info.dtype).removeprefix("torch.")
        method = (checkpoint.quantization_config or {}).get("quant_method")
        already = f" (config.json declares quant_method {method!r})" if method else ""
        raise UserError(
            f"{checkpoint.source}: {name} has dtype {dtype}{already}; a linear layer's weight has to be "
            "BF16, FP16, FP32 or FP8. Give the unquantized checkpoint."
        )
    scale = scale_of(checkpoint, name)
    if scale is not None:
        _scale_blocks(checkpoint, info, scale)


def read_whole(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a tensor of any shape as stored, or in bf16 if it is FP8 with a scale."""
    info = checkpoint.tensors[name]
    if info.dtype not in FLOAT8:
        return checkpoint.read(name)
    experts: list[int | None] = list(range(info.shape[0])) if len(info.shape) == 3 else [None]
    slices = [read_rows(checkpoint, name, 0, info.shape[-2], expert).to(torch.bfloat16) for expert in experts]
    return torch.stack(slices) if len(info.shape) == 3 else slices[0]


def read_rows(checkpoint: Checkpoint, name: str, start: int, stop: int, expert: int | None = None) -> Tensor:
    """Return rows `start:stop` of a 2-D tensor, or of one slice of a 3-D one: as stored, or fp32 if it is
    FP8.
    """
    info = checkpoint.tensors[name]
    first = start if expert is None else expert * info.shape[1] + start
    flat = as_matrix(info)
    rows = flat.read_rows(first, first + stop - start)
    scale = scale_of(checkpoint, name)
    return (
        rows if scale is None else rows.float() * _spread_scale(checkpoint, info, scale, start, stop, expert)
    )


def _scale_blocks(checkpoint: Checkpoint, info: TensorInfo, scale: TensorInfo) -> tuple[int, int]:
    """Return how many rows and columns of the last two dimensions share one number of `scale`."""
    n, k = info.shape[-2], info.shape[-1]
    count = 1
    for length in scale.shape:
        count *= length
    if count == 1:
        return n, k
    if scale.shape in ((n,), (n, 1), (*info.shape[:-1], 1)):
        return 1, k
    block = _declared_block(checkpoint.quantization_config or {}) or _block_of(info, scale)
    expected = (*info.shape[:-2], -(-n // block[0]), -(-k // block[1]))
    if scale.shape != expected:
        raise UserError(
            f"{checkpoint.source}: {scale.name} has shape {list(scale.shape)}; for {info.name} "
            f"{list(info.shape)} it must be one number, one number per row, or {list(expected)} "
            f"(blocks of {list(block)})"
        )
    return block[0], block[1]


def _declared_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many rows and columns share a scale, by DeepSeek's or compressed-tensors' key in the
    config."""
    groups = config.get("config_groups") or {}
    structures = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
    for block in (config.get("weight_block_size"), *structures):
        if isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block):
            return block[0], block[1]
    return None


def _block_of(info: TensorInfo, scale: TensorInfo) -> tuple[int, int]:
    """Return how many rows and columns share a scale, from the shapes alone: 128, or a number that divides
    them exactly.
    """
    (n, k), (rows, columns) = info.shape[-2:], (1, 1, *scale.shape)[-2:]
    if (rows, columns) != (-(-n // 128), -(-k // 128)) and rows and columns and n % rows == k % columns == 0:
        return n // rows, k // columns
    return 128, 128


def _spread_scale(
    checkpoint: Checkpoint, info: TensorInfo, scale: TensorInfo, start: int, stop: int, expert: int | None
) -> Tensor:
    """Return the scale factors of rows `start:stop`, in a shape that broadcasts over these rows."""
    block_n, block_k = _scale_blocks(checkpoint, info, scale)
    n, k = info.shape[-2], info.shape[-1]
    factors = _factors(scale)
    if factors.numel() == 1:
        return factors.view(1, 1)
    factors = factors.view(-1, -(-n // block_n), -(-k // block_k))[expert or 0]
    row_blocks = torch.arange(start, stop) // block_n
    return (
        factors[row_blocks].repeat_interleave(block_k, dim=1)[:, :k] if block_k < k else factors[row_blocks]
    )


def _factors(scale: TensorInfo) -> Tensor:
    """Return the scale's numbers in fp32. MXFP8 stores E8M0, exponents of two, as plain bytes."""
    stored = scale.read()
    return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()
