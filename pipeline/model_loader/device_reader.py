"""Tensors from a file straight to a GPU: several pieces at once, through pinned memory that is used again.

A read into new memory waits for its pages, and a copy from unpinned memory waits for another copy on the
host. Because of both waits, only a quarter of a page cache's speed would be left. Weights that the CPU still
processes are read elsewhere.
"""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ..checkpoints.safetensors_file import TensorInfo

PIECE_BYTES = 16 << 20
PIECES = 8
"""How many pieces are read at once, each by a thread of its own."""


class DeviceReader:
    """Reads to one GPU while it is open."""

    def __init__(self, device: torch.device):
        self.device = device
        self._threads = ThreadPoolExecutor(PIECES, thread_name_prefix="read")
        self._free: SimpleQueue[_Staging] = SimpleQueue()
        for _ in range(PIECES):
            self._free.put(_Staging())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, info: TensorInfo) -> Tensor:
        """Return the tensor on the device. Raise UserError if the file ends early."""
        target = torch.empty(info.nbytes, dtype=torch.uint8, device=self.device)
        pieces = [
            self._threads.submit(self._read_piece, info, start, target[start : start + PIECE_BYTES])
            for start in range(0, info.nbytes, PIECE_BYTES)
        ]
        for piece in pieces:
            piece.result()
        return target.view(info.dtype).view(info.shape)

    def _read_piece(self, info: TensorInfo, start: int, target: Tensor) -> None:
        staging = self._free.get()
        try:
            staging.copied.synchronize()
            piece = staging.memory[: len(target)]
            info.read_into(piece.numpy().data, start)
            target.copy_(piece, non_blocking=True)
            staging.copied.record(torch.cuda.current_stream(self.device))
        finally:
            self._free.put(staging)


class _Staging:
    """Pinned memory for one piece, and the event after which it is free again."""

    def __init__(self) -> None:
        self.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()
