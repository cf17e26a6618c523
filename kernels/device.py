"""Properties of the device that kernels run on."""

import functools

import torch


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) under the interpreter. PTX converts e4m3 from (8, 9) on, launches overlap from (9, 0) on."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
