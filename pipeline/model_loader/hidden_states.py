"""The hidden states of a text between two decoder layers: on the GPU, in memory, or in a file if there are
many.

The states are read and written a few sequences at a time. The file is unlinked as soon as it is open, so
nothing is left of it whatever happens.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

CPU = torch.device("cpu")
MEMORY_BYTES = 1 << 28
"""Hidden states up to this size stay in memory; larger ones are spilled. A layer has three of them."""
GPU_BYTES, GPU_SHARE = 3 << 30, 1 / 16
"""Hidden states up to this size, and up to this share of a GPU's memory, stay on the GPU: copies to it and
back take longer than a layer does."""
GPU_VARIANTS_SHARE = 1 / 4
"""The same share for the many variants that `sensitivity.py` holds."""


class HiddenStates:
    """Hidden states [sequences, tokens, hidden] in one dtype; on a GPU, on the CPU or on disk."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        folder: Path | None = None,
        device: torch.device = CPU,
        for_variants: bool = False,
    ):
        """folder: where states are spilled; by default the system's folder for temporary files
        device: where the layers run
        for_variants: whether they hold many variants of a text, for which a GPU's memory has less room
        """
        self.shape, self.dtype = shape, dtype
        self.bytes_each = shape[1] * shape[2] * dtype.itemsize
        whole = shape[0] * self.bytes_each
        room = 0 if device.type == "cpu" else gpu_room(device, for_variants)
        self.device = device if whole <= room else CPU
        self.is_spilled = self.device == CPU and whole > MEMORY_BYTES
        if self.is_spilled:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with the last reference
        else:
            self._tensor = torch.empty(shape, dtype=dtype, device=self.device)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the states of sequences `start:stop`, as far as they exist, in their own memory."""
        stop = min(stop, self.shape[0])
        if not self.is_spilled:
            return self._tensor[start:stop].clone()
        self._file.seek(start * self.bytes_each)
        content = bytearray((stop - start) * self.bytes_each)
        if self._file.readinto(content) != len(content):
            raise ValueError(f"sequences {start}:{stop} were not written before they were read")
        return torch.frombuffer(content, dtype=self.dtype).view(-1, *self.shape[1:])

    def write(self, start: int, values: Tensor) -> None:
        """Write the states of sequences from `start` on. values: [n, tokens, hidden] on any device."""
        values = values.to(self.device, self.dtype).contiguous()
        if not self.is_spilled:
            self._tensor[start : start + len(values)] = values
            return
        self._file.seek(start * self.bytes_each)
        self._file.write(values.view(torch.uint8).numpy().data)


class StatesPart:
    """One text's hidden states: sequences `first` to `first + count` of hidden states that hold several
    texts.
    """

    def __init__(self, whole: HiddenStates, first: int, count: int):
        self._whole, self._first, self._count = whole, first, count

    def read(self, start: int, stop: int) -> Tensor:
        return self._whole.read(self._first + start, self._first + min(stop, self._count))

    def write(self, start: int, values: Tensor) -> None:
        self._whole.write(self._first + start, values)


AnyStates = HiddenStates | StatesPart


def gpu_room(device: torch.device, for_variants: bool) -> int:
    """Return the bytes of a GPU's memory that the states before one layer may take."""
    memory = torch.cuda.get_device_properties(device).total_memory
    return int(GPU_VARIANTS_SHARE * memory) if for_variants else min(GPU_BYTES, int(GPU_SHARE * memory))
