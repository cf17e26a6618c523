"""Checks that every convention makes of its tensors: presence, dtype and shape.

The errors name the tensor, the shape or dtype by the config, and the one in the file. Not for reading
weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.int4 import Int4
from ...layouts.formats.weight_format import WeightFormat
from ..checkpoints.checkpoint import Checkpoint, TensorInfo
from .targets import matches_wildcard

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def require_tensor(
    checkpoint: Checkpoint,
    name: str,
    dtypes: Sequence[torch.dtype],
    shape: tuple[int, ...] | None = None,
    because: str = "the quantization config calls for it",
) -> TensorInfo:
    """Return the checkpoint's entry for `name`; raise UserError if it is missing or has another shape or
    dtype.
    """
    info = checkpoint.tensors.get(name)
    if info is None:
        raise UserError(
            f"{checkpoint.source}: tensor {name} is missing, and {because}. "
            f"The checkpoint is incomplete or its quantization config does not describe it."
        )
    if info.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(info.dtype).removeprefix("torch.")
        raise UserError(f"{checkpoint.source}: tensor {name} has dtype {found}; it has to be {allowed}")
    if shape is not None and tuple(info.shape) != shape:
        raise UserError(
            f"{checkpoint.source}: tensor {name} has shape {list(info.shape)}; "
            f"by the quantization config it has to be {list(shape)}"
        )
    return info


def scalar_shape(checkpoint: Checkpoint, name: str) -> None:
    """Refuse `name` unless it holds exactly one number, as [] or [1]."""
    shape = tuple(checkpoint.tensors[name].shape)
    if shape not in ((), (1,)):
        raise UserError(
            f"{checkpoint.source}: tensor {name} has shape {list(shape)}; it has to be one number"
        )


def positive_scalar(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return the only number in `name`, fp32 []; raise UserError if it is not a valid scale."""
    value = checkpoint.read(name).float().reshape(())
    if not bool(torch.isfinite(value)) or float(value) <= 0:
        raise UserError(f"{checkpoint.source}: {name} is {float(value)}; it has to be positive")
    return value


def refuse_shape(checkpoint: Checkpoint, name: str, spec: WeightFormat, n: int, k: int) -> None:
    """Raise UserError if the format cannot hold the weight `name` [n, k]."""
    reason = spec.refuses(n, k)
    if reason is not None:
        raise UserError(f"{checkpoint.source}: {name} cannot be {spec.label}: {reason}")


def int4_spec(checkpoint: Checkpoint, module: str, **parameters: Any) -> Int4:
    """Return the INT4 spec that the checkpoint declares; raise UserError if its parameters are not
    allowed.
    """
    try:
        return Int4(**parameters)
    except ValueError as error:
        raise UserError(
            f"{checkpoint.source}: {module} is stored in a form of INT4 that Scalegate does not read: {error}"
        ) from error


def not_converted(checkpoint: Checkpoint, module: str) -> str | None:
    """Return the entry of transformers' `modules_to_not_convert` that excludes `module`; None if there is
    none.
    """
    patterns = (checkpoint.quantization_config or {}).get("modules_to_not_convert") or []
    return next((pattern for pattern in patterns if matches_wildcard(pattern, module)), None)
