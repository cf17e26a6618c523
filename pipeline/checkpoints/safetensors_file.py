"""Reading one safetensors file by plain reads, with its header checked, so that only the caller's tensors
take memory.

Whole checkpoints are read by `checkpoint.py`; files are not memory-mapped, because mapped pages count against
the process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...base.untrusted_files import parse_json

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
MAX_LENGTH = 1 << 50
LFS_POINTER = b"version https://git-lfs"
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorInfo:
    """The position of one tensor in a file; its data has not been read."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    """The position of the data, in bytes from the beginning of the file."""
    nbytes: int

    def read(self) -> Tensor:
        """Return the tensor on the CPU, in its own memory."""
        return self._read(self.shape, 0, self.nbytes)

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Return `tensor[start:stop]` along the first dimension, reading only those bytes."""
        row_bytes = self.nbytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return self._read(shape, start * row_bytes, (stop - start) * row_bytes)

    def read_chunks(self) -> Iterator[Tensor]:
        """Yield the elements in order, one-dimensional, a bounded piece at a time."""
        for start in range(0, self.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, self.nbytes - start)
            yield self._read((nbytes // self.dtype.itemsize,), start, nbytes)

    def read_into(self, view: memoryview, skip: int) -> None:
        """Fill `view` with the tensor's bytes from `skip` on."""
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.offset + skip)
            while view:
                count = file.readinto(view)
                if not count:
                    raise _short_read(self)
                view = view[count:]

    def _read(self, shape: tuple[int, ...], skip: int, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.read_into(buffer.numpy().data, skip)
        return buffer.view(self.dtype).view(shape)


@dataclass(frozen=True)
class SafetensorsHeader:
    """The header of one file, already checked against the file's size."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check `path`'s header. Raises UserError if the file is truncated or corrupt."""
    try:
        size = path.stat().st_size
        if not path.is_file():  # opening a pipe would wait for ever
            raise UserError(f"{path} is not a regular file; put a regular file in its place")
        with open(path, "rb") as file:
            start = file.read(8)
            if start + file.read(len(LFS_POINTER) - 8) == LFS_POINTER:
                raise UserError(
                    f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in its repository"
                )
            length = int.from_bytes(start, "little")
            if len(start) < 8:
                raise _corrupt(path, f"it is truncated: {size} bytes, too short for a header")
            if length > MAX_HEADER_BYTES:
                raise _corrupt(path, f"its header claims {length} bytes")
            if 8 + length > size:
                raise _corrupt(path, f"it is truncated: {size} bytes, its header alone takes {8 + length}")
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    try:
        entries = parse_json(raw, "its header")
    except UserError as error:
        raise _corrupt(path, error.message) from error
    if not isinstance(entries, dict):
        raise _corrupt(path, "its header is not a JSON object")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _corrupt(path, "its header's __metadata__ is not text by name")
    tensors = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_extents(path, tensors, 8 + length, size)
    return SafetensorsHeader(tensors, metadata)


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        shape = tuple(_number(length) for length in entry["shape"])
        begin, end = (_number(offset) for offset in entry["data_offsets"])
        dtype_name = str(entry["dtype"])
        if len(shape) > MAX_DIMENSIONS or not name.isprintable():
            raise ValueError(name)
    except (TypeError, KeyError, ValueError) as error:
        raise _corrupt(path, f"its header's entry for tensor {name[:200]!r} is malformed") from error
    if dtype_name not in DTYPES:
        raise UserError(
            f"{path}: tensor {name!r} has dtype {dtype_name}, which Scalegate does not read; "
            f"it reads: {', '.join(DTYPES)}"
        )
    dtype = DTYPES[dtype_name]
    count = 1
    for length in shape:
        count *= length
    if end - begin != count * dtype.itemsize:
        raise _corrupt(
            path, f"tensor {name!r} {list(shape)} {dtype_name} is given {end - begin} bytes in the header"
        )
    return TensorInfo(name, dtype, shape, path, data_start + begin, end - begin)


def _number(value: Any) -> int:
    """Return a length or an offset; raise ValueError for anything else, and for lengths beyond any file."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_LENGTH:
        raise ValueError(value)
    return value


def _check_extents(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """Raise UserError unless the tensors fill the file without holes and overlaps, as the format requires."""
    position = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            what = "overlaps its neighbour" if info.offset < position else "leaves a hole before it"
            raise _corrupt(path, f"tensor {info.name!r} {what}")
        position += info.nbytes
    if size < position:
        raise _corrupt(path, f"it is truncated: {size} bytes, its header describes {position}")
    if size > position:
        raise _corrupt(path, f"{size - position} bytes follow the last tensor its header describes")


def _corrupt(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not a whole safetensors file: {why}. Download or copy the file again.")


def _short_read(info: TensorInfo) -> UserError:
    return _corrupt(info.file, f"it ended while tensor {info.name!r} was being read")


def hold_the_same(tensor: TensorInfo, other: TensorInfo) -> bool:
    """Say whether two tensors are equal, dtype and shape included; they are read in chunks, up to the first
    difference.
    """
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    pairs = zip(tensor.read_chunks(), other.read_chunks(), strict=False)
    return all(torch.equal(here, there) for here, there in pairs)
