"""The device and the dtype that a command's options name; shared by all that load a model."""

import torch

from ..layouts.errors import UserError

DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""By the name an option has; auto is the checkpoint's own."""


def resolve_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name; None is the checkpoint's own."""
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}; choose one of: {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_device(device: str) -> str:
    """`auto` made concrete, anything else checked."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"unknown device {device!r}; give cpu, cuda or cuda:N") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device that PyTorch can use; give --device cpu")
    return device
