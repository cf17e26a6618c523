"""Copies between host and device that do not wait for the device's current work.

Weights are copied elsewhere: each copy allocates its own pinned memory, so copies should be small.
"""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for the steps in flight, as a plain copy to a GPU would."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class DeviceToHostCopy:
    """An asynchronous copy of a tensor from the device to the host."""

    def __init__(self, tensor: Tensor):
        self._event: torch.cuda.Event | None = None
        self._values = tensor
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
