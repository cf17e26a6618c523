"""Dequantizes weights that a checkpoint stores in 4 or 8 bits to 16-bit tensors.

This file is the contract; each format has a file of its own. Decoded tensors are for sources and baselines:
nothing is served in these formats. FP8 is `float_source.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .safetensors_file import TensorInfo

Decode = Callable[[int, int], Tensor]
"""Decodes rows `start:stop` of a tensor as a matrix, whose columns are the tensor's last dimension."""


@dataclass(frozen=True)
class DecodedTensor(TensorInfo):
    """A tensor that no file holds directly; `nbytes` counts the tensors that it is made from."""

    decode: Decode = lambda start, stop: NotImplemented
    stored_as: str = ""
    """The name of the format, with its parameters."""
    parts: tuple[TensorInfo, ...] = ()
    """The tensors of codes and scales that it is made from."""
    check: Callable[[], None] | None = None
    """Reads its small parts and raises UserError if they contradict the others; None if there are none."""

    def read(self) -> Tensor:
        return self.read_rows(0, self.shape[0])

    def read_rows(self, start: int, stop: int) -> Tensor:
        rows = 1
        for length in self.shape[1:-1]:
            rows *= length
        return self.decode(start * rows, stop * rows).view(stop - start, *self.shape[1:])

    def read_chunks(self) -> Iterator[Tensor]:
        for index in range(self.shape[0]):
            yield self.read_rows(index, index + 1).reshape(-1)

    def read_into(self, view: memoryview, skip: int) -> None:
        raise TypeError(f"{self.name} is made from several tensors; no bytes of a file are its own")


def as_decoded(
    tensors: Mapping[str, TensorInfo], made: Mapping[str, tuple[DecodedTensor, tuple[str, ...]]]
) -> dict[str, TensorInfo]:
    """Return `tensors` with each decoded tensor in place of the tensors that it is made from.

    made: by the name of the first source tensor in the files, the decoded tensor and all source tensors that
    it replaces
    """
    replaced = {part for _, parts in made.values() for part in parts}
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name in made:
            found[made[name][0].name] = made[name][0]
        elif name not in replaced:
            found[name] = info
    return found


def decoded(
    name: str, parts: list[TensorInfo], dtype: Any, shape: tuple[int, ...], decode: Decode, stored_as: str
) -> DecodedTensor:
    first = parts[0]
    nbytes = sum(part.nbytes for part in parts)
    return DecodedTensor(
        name, dtype, shape, first.file, first.offset, nbytes, decode, stored_as, tuple(parts)
    )


def as_matrix(info: TensorInfo) -> TensorInfo:
    """Return the tensor with all dimensions but the last as one."""
    rows = 1
    for length in info.shape[:-1]:
        rows *= length
    return replace(info, shape=(rows, info.shape[-1]))
