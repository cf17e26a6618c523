"""The default dtype that a checkpoint runs in, from its config and headers alone.

`validation/cpu_dtype.py` finds the dtype in which a CPU is faster.
"""

import torch

from .checkpoint import Checkpoint

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def default_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the config's dtype; if it has none, the dtype of the first unquantized tensor, or else bf16."""
    text = checkpoint.config.get("text_config") or {}
    for section in (checkpoint.config, text):
        name = section.get("dtype") or section.get("torch_dtype")
        dtype = getattr(torch, str(name).removeprefix("torch."), None) if name else None
        if dtype in FLOATS:
            return dtype
    stored = (info.dtype for info in checkpoint.tensors.values() if info.dtype in FLOATS)
    return next(stored, torch.bfloat16)
