"""What a layout is: an arrangement of a weight's bytes, and the kernel that multiplies by them.

There is one file in this folder for each layout; `all_layouts.py` registers the layouts. This file has the
contract, and the reasons for refusing a problem that all layouts share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...base.batch_invariance import BatchInvariance
from ...base.registry import Registry
from ...kernels.cpu.calls import Call
from ..formats.input_format import InputFormat, dynamic_input
from ..formats.weight_format import Weight, WeightFormat
from .routing import Routing


@dataclass(frozen=True)
class Experts:
    """The experts of one product: every token is multiplied by `top_k` of `count` weights."""

    count: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.count} experts, top {self.top_k}"


@dataclass(frozen=True)
class Problem:
    """A problem that a layout may serve: one linear layer's product on one device, for every M.

    spec:     the weight's format with its parameters
    n, k:     the shape of the weight: of merged layers together, or of one expert
    dtype:    the dtype of the activations and of the result
    experts:  the number of experts and of experts per token; None for a dense layer
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
        """Return the problem of a dense layer with this weight."""
        return cls(weight.spec, *weight.shape, dtype, device)

    def __str__(self) -> str:
        """Return the problem's key in layout plans, such as `int4 g128 zp 24576x4096 bfloat16`, without the
        device.
        """
        words = [self.spec.key, f"{self.n}x{self.k}", _dtype_name(self.dtype)]
        words += [f"({self.experts})"] if self.experts else []
        words += [self.batch_invariance] if self.batch_invariance != "tuned" else []
        return " ".join(words)


@dataclass(frozen=True)
class PackedWeight:
    """A weight arranged for one layout's kernel.

    spec:       the format of the weight that it was made from
    shape:      (N, K), with experts (E, N, K)
    tensors:    what the kernel reads. They become buffers of the module, so that they move with it and count
                towards its size
    attributes: other numbers that the kernel needs, such as padding or the group size
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


MANY_ROWS = 256
"""Rows of x from which decoding a weight once for the whole product pays on a CPU with AMX."""
IS_FOR = "is for"
"""How a refusal begins if the layout serves another format, kind of device or kind of layer."""
FOR_INVARIANCE_ONLY = f"{IS_FOR} --batch-invariance pin and per-token only"
"""Why a layout that exists for batch invariance refuses in mode `tuned`."""


@dataclass(frozen=True)
class Serves:
    """The part of a layout's limits that all layouts describe alike. The rest is in the layout's own
    `refuses`.

    formats:  spec classes that the layout serves; None if it serves any
    device:   `cpu` or `cuda`; None if it serves both
    dtypes:   dtypes of activations that it serves; None if it serves any
    experts:  whether it serves experts; if so, it serves nothing else
    invariance_modes: the modes of batch invariance that its kernel guarantees
    """

    formats: tuple[type, ...] | None = None
    device: str | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    experts: bool = False
    invariance_modes: tuple[BatchInvariance, ...] = ("tuned",)
    capability: tuple[int, int] | None = None
    """The least compute capability of a CUDA device."""
    rounds_inputs: bool = False
    """Whether it rounds inputs itself if the format rounds them as they come (`RoundingLayout`)."""

    def refuses(self, problem: Problem) -> str | None:
        """Return None if the layout's fields allow the problem, otherwise the reason in a few words."""
        if self.formats is not None and not isinstance(problem.spec, self.formats):
            taken = ", ".join(str(getattr(spec, "name", spec.__name__)) for spec in self.formats)
            return f"{IS_FOR} {taken}, not {problem.spec.name}"
        if self.experts != (problem.experts is not None):
            return f"{IS_FOR} experts only" if self.experts else f"{IS_FOR} dense layers, not for experts"
        if self.device is not None and problem.device.type != self.device:
            where = "CUDA" if self.device == "cuda" else "the CPU"
            return f"{IS_FOR} {where}, not for {problem.device.type}"
        if self.dtypes is not None and problem.dtype not in self.dtypes:
            taken = " or ".join(map(_dtype_name, self.dtypes))
            return f"takes {taken} activations, not {_dtype_name(problem.dtype)}"
        if problem.batch_invariance not in self.invariance_modes:
            return f"is not batch-invariant as {problem.batch_invariance!r} asks"
        is_emulated = problem.device.type == "cpu" and dynamic_input(problem.spec) is not None
        if is_emulated and not self.rounds_inputs:
            return f"{IS_FOR} rounded inputs in 16 bits; a CPU emulates them in float32"
        if self.capability is not None and torch.cuda.get_device_capability(problem.device) < self.capability:
            return f"needs compute capability {'.'.join(map(str, self.capability))}"
        return None


class Layout(Protocol):
    """One arrangement of bytes and the product that reads it."""

    @property
    def name(self) -> str: ...

    @property
    def kernel(self) -> str:
        """The kernel's name, as shown in a profile or a failed check."""
        ...

    def refuses(self, problem: Problem) -> str | None:
        """Return None if the layout serves the problem, otherwise the reason in a few words."""
        ...

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        """Arrange `weight` on its own device, for activations of `dtype`."""
        ...

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """Multiply: `y = x @ dequantize().T`, with x [M, K], contiguous, in the packed dtype; return a new y
        [M, N] in that dtype.

        The method is called for every layer of every step, thousands of times a second, so whatever can be
        computed in `pack` should be.
        """
        ...


@runtime_checkable
class ExpertsLayout(Protocol):
    """A layout of the stacked weights of one layer's experts, in the same registry."""

    @property
    def name(self) -> str: ...

    @property
    def kernel(self) -> str: ...

    def refuses(self, problem: Problem) -> str | None: ...

    def pack_experts(self, weights: Sequence[Weight], dtype: torch.dtype) -> PackedWeight:
        """Arrange the weights of all experts, which have one spec and shape, on their own device."""
        ...

    def grouped_matmul(self, x: Tensor, packed: PackedWeight, routing: Routing) -> Tensor:
        """Multiply by each row's expert: `y[t * top_k + j] = x[row(t, j)] @ dequantize(expert[t, j]).T`.

        x: [T, K], row t for each of token t's experts; or [T * top_k, K], a row for each; contiguous
        y: [T * top_k, N]. On CUDA the method must not wait for the device, since it runs inside CUDA graphs.
        """
        ...


@runtime_checkable
class BindingLayout(Protocol):
    """A layout whose product costs less if what does not differ from call to call is looked up once."""

    def product_by(self, packed: PackedWeight) -> Callable[[Tensor], Tensor]:
        """Return `matmul` by this weight, whose tensors stay where they are; y is contiguous."""
        ...


@runtime_checkable
class CallLayout(Protocol):
    """A layout whose product can be one of a list of compiled calls."""

    def call_by(self, packed: PackedWeight, x: int, y: int) -> Call | None:
        """Return the call that multiplies x [T, K] by this weight to y [T, N], both contiguous and known by
        their places in the step's numbers; None if this weight has none. It is for fewer than MANY_ROWS rows.
        """
        ...


@runtime_checkable
class RoundingLayout(Protocol):
    """A layout that can round inputs by itself, in more precision than their dtype has."""

    @property
    def rounds_inputs(self) -> bool: ...


@runtime_checkable
class InputScalesLayout(Protocol):
    """A layout that rounds inputs by itself, by the scales that a layer's checkpoint has for them."""

    def with_input(self, packed: PackedWeight, input_format: InputFormat) -> PackedWeight:
        """Return the packed weight for inputs that are rounded by `input_format`."""
        ...


@runtime_checkable
class RoundedRowsLayout(Protocol):
    """A layout whose product also takes inputs that another kernel has rounded to E4M3, token by token."""

    def takes_rounded(self, spec: WeightFormat) -> bool:
        """Say whether inputs of weights of this format are rounded so, with a scale of its own each row."""
        ...

    def matmul_rounded(
        self, codes: Tensor, scales: Tensor, packed: PackedWeight, dtype: torch.dtype
    ) -> Tensor:
        """Return y [M, N] of `dtype`, as `matmul` does of the inputs that are rounded to codes
        float8_e4m3fn [M, K] and scales fp32 [1, M].
        """
        ...


def rounds_inputs(layout: object) -> bool:
    """Say whether a layout's product gets unrounded inputs, and rounds them as the weight's spec requires."""
    return isinstance(layout, RoundingLayout) and layout.rounds_inputs


@runtime_checkable
class EmulatingLayout(Protocol):
    """A layout that rounds inputs by itself, and multiplies them in a wider dtype than the format's."""

    @property
    def emulates(self) -> bool: ...


def emulates_inputs(layout: object) -> bool:
    """Say whether a layout multiplies rounded inputs in 16 or 32 bits, so that its speed is not the
    format's.
    """
    if not rounds_inputs(layout):
        return True
    return isinstance(layout, EmulatingLayout) and layout.emulates


AnyLayout = Layout | ExpertsLayout

LAYOUTS: Registry[AnyLayout] = Registry("layout")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
