"""The layout seam: how a quantized weight's bytes are arranged for a kernel, and the kernel that reads them.

One file in this folder for each layout; `all_layouts.py` registers them. This file is the contract, no logic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .int4 import Int4Weight
from .nvfp4 import NVFP4Weight
from .registry import Registry

QuantizedWeight = Int4Weight | NVFP4Weight


@dataclass(frozen=True)
class Problem:
    """What a layout is asked to serve: one linear layer's product on one device, for every M.

    `weight_format` is the class of the weight; `dtype` that of the activations and of the result.
    """

    weight_format: type
    group_size: int
    integer_zero: bool
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> "Problem":
        n, k = weight.shape
        integer_zero = getattr(weight, "has_integer_zero", True)
        return cls(type(weight), weight.group_size, integer_zero, n, k, dtype, device)


@dataclass(frozen=True)
class PackedWeight:
    """A weight arranged for one layout's kernel.

    tensors: what the kernel reads; they become the module's buffers, so they move and are counted with it
    meta:    plain numbers the kernel needs besides (padding, group size), never tensors
    """

    layout: str
    shape: tuple[int, int]
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Layout(Protocol):
    """One arrangement of bytes and the product that reads it."""

    @property
    def name(self) -> str: ...

    @property
    def kernel(self) -> str:
        """The kernel's own name, as a profiler or a failed check shows it."""
        ...

    def refuses(self, problem: Problem) -> str | None:
        """None where the layout serves the problem, otherwise the reason in a few words."""
        ...

    def pack(self, weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
        """Arrange `weight` on the device it lies on, for activations of `dtype`."""
        ...

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """x [M, K] in the packed dtype, contiguous, to a new y [M, N] in it, `y = x @ dequantize().T`.

        Called once for every layer and step, so a microsecond spent here in Python is spent thousands of
        times a second: what can be worked out in `pack` belongs there.
        """
        ...


@runtime_checkable
class JoiningLayout(Protocol):
    """A layout that can also make one weight of several that get the same input."""

    def join(self, packed: Sequence[PackedWeight]) -> PackedWeight | None:
        """Their rows one after another; None where the shapes do not allow it. Their `meta` are equal."""
        ...


LAYOUTS: Registry[Layout] = Registry("layout")
