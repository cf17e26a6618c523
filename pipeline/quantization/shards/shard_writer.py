"""Writing one safetensors file a tensor at a time, so that memory never holds more than one tensor.

The header comes first in the file but is known last: room is kept for the header, and it is padded with
spaces, as the format allows. `write_shards.py` decides which tensor goes into which file.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from ...checkpoints.safetensors_file import DTYPE_NAMES

ALIGNMENT = 8


class ShardWriter:
    """A context manager over a new file at `path`; the header is written when it closes without an error."""

    def __init__(self, path: Path, header_bytes: int, metadata: dict[str, str]):
        """`header_bytes`: at least what the header will take, see `header_room`."""
        self.path = path
        self.header_bytes = -(-header_bytes // ALIGNMENT) * ALIGNMENT
        self.entries: dict[str, object] = {"__metadata__": metadata}
        self.position = 0

    def __enter__(self) -> "ShardWriter":
        self.file: BinaryIO = open(self.path, "wb")
        self.file.seek(8 + self.header_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.file:
            if error is not None:
                return
            header = json.dumps(self.entries, separators=(",", ":")).encode()
            if len(header) > self.header_bytes:
                raise ValueError(f"header of {len(header)} bytes; room was kept for {self.header_bytes}")
            self.file.seek(0)
            self.file.write(self.header_bytes.to_bytes(8, "little"))
            self.file.write(header.ljust(self.header_bytes))
            self.file.flush()
            os.fsync(self.file.fileno())

    def add(self, name: str, tensor: Tensor) -> None:
        self.add_chunks(name, tensor.dtype, tuple(tensor.shape), [tensor.cpu().contiguous().reshape(-1)])

    def add_chunks(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Iterable[Tensor]
    ) -> None:
        if name in self.entries:
            raise ValueError(f"tensor {name!r} is written twice")
        start = self.position
        for chunk in chunks:
            raw = chunk.view(torch.uint8).numpy().data
            self.file.write(raw)
            self.position += raw.nbytes
        self.entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, self.position],
        }


def header_room(names: Iterable[str], metadata: dict[str, str]) -> int:
    """Return the bytes that a header with these tensors and this metadata cannot exceed."""
    longest_entry = len('"":{"dtype":"F8_E4M3","shape":[],"data_offsets":[,]},') + 6 * 20
    escaped = sum(len(json.dumps(name)) + longest_entry for name in names)
    return escaped + len(json.dumps(metadata)) + 64
