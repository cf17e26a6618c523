"""The device and the dtype that a command's options name; shared by all that load a model."""

import torch

from ...base.errors import UserError
from ...serving_check.engine.options import AUTO, DTYPES

DTYPE_OF = {name: None if name == AUTO else getattr(torch, name) for name in DTYPES}


def resolve_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of that name; None stands for the checkpoint's own dtype."""
    if name not in DTYPE_OF:
        raise UserError(f"unknown dtype {name!r}; choose one of: {', '.join(DTYPES)}")
    return DTYPE_OF[name]


def resolve_device(device: str) -> str:
    """Return the device: `auto` is resolved, any other name is checked."""
    if device == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"unknown device {device!r}; give cpu, cuda or cuda:N") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device that PyTorch can use; give --device cpu")
    return device
