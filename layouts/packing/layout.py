"""The layout seam: how a weight's bytes are arranged for a kernel, and the kernel that reads them.

One file in this folder for each layout; `all_layouts.py` registers them. This file is the contract, and what
all layouts refuse in the same words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...base.batch_invariance import BatchInvariance
from ...base.registry import Registry
from ..formats.weight_format import Weight, WeightFormat
from .routing import Routing


@dataclass(frozen=True)
class Experts:
    """The experts that one product is made of: every token is multiplied by `top_k` of `count` weights."""

    count: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.count} experts, top {self.top_k}"


@dataclass(frozen=True)
class Problem:
    """What a layout is asked to serve: one linear layer's product on one device, for every M.

    spec:     the weight's format with its parameters
    n, k:     the weight's shape, of merged layers together; with experts that of one expert
    dtype:    of the activations and of the result
    experts:  None for a dense layer
    """

    spec: WeightFormat
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    experts: Experts | None = None
    batch_invariance: BatchInvariance = "tuned"

    @classmethod
    def of(cls, weight: Weight, dtype: torch.dtype, device: torch.device) -> "Problem":
        """Of a dense layer with this weight."""
        return cls(weight.spec, *weight.shape, dtype, device)

    def __str__(self) -> str:
        """`int4 g128 zp 24576x4096 bfloat16`: what plans file it under. The device is not in it."""
        words = [self.spec.key, f"{self.n}x{self.k}", _dtype_name(self.dtype)]
        words += [f"({self.experts})"] if self.experts else []
        words += [self.batch_invariance] if self.batch_invariance != "tuned" else []
        return " ".join(words)


@dataclass(frozen=True)
class PackedWeight:
    """A weight arranged for one layout's kernel.

    spec:       the format of the weight that it was made from
    shape:      (N, K), with experts (E, N, K)
    tensors:    what the kernel reads; they become the module's buffers, so they move and are counted with it
    attributes: plain numbers the kernel needs besides (padding, group size), never tensors
    """

    layout: str
    spec: WeightFormat
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    attributes: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True)
class Serves:
    """What a layout takes, in the terms that all layouts share; its own `refuses` says the rest.

    formats:  spec classes; None takes any
    device:   `cpu` or `cuda`; None takes any
    dtypes:   of activations; None takes any
    experts:  whether it multiplies by experts; it then serves nothing else
    invariance_modes: those it keeps
    """

    formats: tuple[type, ...] | None = None
    device: str | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    experts: bool = False
    invariance_modes: tuple[BatchInvariance, ...] = ("tuned",)
    capability: tuple[int, int] | None = None
    """The least compute capability of a CUDA device."""

    def refuses(self, problem: Problem) -> str | None:
        """None where all of this holds, otherwise the reason in a few words."""
        if self.formats is not None and not isinstance(problem.spec, self.formats):
            taken = ", ".join(str(getattr(spec, "name", spec.__name__)) for spec in self.formats)
            return f"takes {taken}, not {problem.spec.name}"
        if self.experts != (problem.experts is not None):
            return "multiplies by experts only" if self.experts else "does not multiply by experts"
        if self.device is not None and problem.device.type != self.device:
            where = "CUDA" if self.device == "cuda" else "the CPU"
            return f"runs on {where}, not on {problem.device.type}"
        if self.dtypes is not None and problem.dtype not in self.dtypes:
            taken = " or ".join(map(_dtype_name, self.dtypes))
            return f"takes {taken} activations, not {_dtype_name(problem.dtype)}"
        if problem.batch_invariance not in self.invariance_modes:
            return f"is not batch-invariant as {problem.batch_invariance!r} asks"
        if self.capability is not None and torch.cuda.get_device_capability(problem.device) < self.capability:
            return f"needs compute capability {'.'.join(map(str, self.capability))}"
        return None


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

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        """Arrange `weight` on the device it lies on, for activations of `dtype`."""
        ...

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """x [M, K] in the packed dtype, contiguous, to a new y [M, N] in it, `y = x @ dequantize().T`.

        Called once for every layer and step, so a microsecond spent here in Python is spent thousands of
        times a second: what can be worked out in `pack` belongs there.
        """
        ...


@runtime_checkable
class ExpertsLayout(Protocol):
    """A layout of the stacked weights of one layer's experts; registered beside the others."""

    @property
    def name(self) -> str: ...

    @property
    def kernel(self) -> str: ...

    def refuses(self, problem: Problem) -> str | None: ...

    def pack_experts(self, weights: Sequence[Weight], dtype: torch.dtype) -> PackedWeight:
        """Arrange the weights of all experts, alike in spec and shape, on the device they lie on."""
        ...

    def grouped_matmul(self, x: Tensor, packed: PackedWeight, routing: Routing) -> Tensor:
        """Every row by its expert's weight, `y[t * top_k + j] = x[row(t, j)] @ dequantize(expert[t, j]).T`.

        x: [T, K], row t for each of token t's experts; or [T * top_k, K], a row for each; contiguous
        y: [T * top_k, N]. On CUDA nothing waits for the device: this runs inside graphs.
        """
        ...


AnyLayout = Layout | ExpertsLayout

LAYOUTS: Registry[AnyLayout] = Registry("layout")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
