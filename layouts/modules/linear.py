"""A linear layer whose weight is packed for one layout; replaces `torch.nn.Linear`."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import cast

import torch
from torch import Tensor, library, nn

from ...kernels.cpu.calls import Call
from ..formats.input_format import InputFormat, dynamic_input
from ..formats.weight_format import WeightFormat, spec_from_json, spec_to_json
from ..packing.all_layouts import LAYOUTS
from ..packing.layout import BindingLayout, CallLayout, InputScalesLayout, Layout, PackedWeight, rounds_inputs

INPUT_BUFFER = "input_{}"


class QuantizedLinear(nn.Module):
    """`y = x @ W.T + bias` with W packed; the packed tensors are the module's buffers.

    The input x is [..., K] in the packed dtype, the output y [..., N] in the same dtype. With an
    `input_format`, or an input format of the weight's spec, x is rounded first, in every layout: the
    checkpoint defines that, not the kernel. The layout chooses only where x is rounded and in which
    precision.
    """

    def __init__(self, packed: PackedWeight, bias: Tensor | None, input_format: InputFormat | None = None):
        super().__init__()
        self.layout = cast(Layout, LAYOUTS[packed.layout])
        if input_format is not None and isinstance(self.layout, InputScalesLayout):
            packed = self.layout.with_input(packed, input_format)
        self.out_features, self.in_features = packed.shape
        self._packed = packed
        self._spec = spec_text(packed.spec)
        for name, tensor in packed.tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None
        self._has_bias = bias is not None
        self.input_format = input_format or dynamic_input(packed.spec)
        self._rounds_before = self.input_format is not None and not rounds_inputs(self.layout)
        if self.input_format is not None:
            for name, tensor in self.input_format.tensors().items():
                self.register_buffer(INPUT_BUFFER.format(name), tensor, persistent=False)

    @property
    def packed(self) -> PackedWeight:
        """Return the packed weight, on the device that the module is on now."""
        return self._packed

    @property
    def dtype(self) -> torch.dtype:
        return self._packed.dtype

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self._packed = replace(
            self._packed, tensors={name: getattr(self, name) for name in self._packed.tensors}
        )
        if self.input_format is not None:
            names = self.input_format.tensors()
            moved = {name: getattr(self, INPUT_BUFFER.format(name)) for name in names}
            self.input_format = self.input_format.with_tensors(moved)
        return self

    def forward(self, x: Tensor) -> Tensor:
        # On a small model this method's own overhead is a good part of the layer's time. So the packed weight
        # and the bias flag are plain attributes, since a buffer or parameter is looked up four times slower,
        # and the shape that decoders use is written out, since unpacking it costs another microsecond.
        rows = x.reshape(-1, self.in_features).contiguous()
        if self._rounds_before and self.input_format is not None:
            rows = self.input_format.round(rows)
        if torch.compiler.is_compiling():
            y = _packed_product(rows, self._packed, self._spec)
        else:
            y = self.layout.matmul(rows, self._packed)
        if self._has_bias and self.bias is not None:
            y.add_(self.bias)
        shape = x.shape
        if len(shape) == 3:
            return y.view(shape[0], shape[1], self.out_features)
        return y.view(*shape[:-1], self.out_features)

    def product_of_rows(self) -> Callable[[Tensor], Tensor] | None:
        """Return the product of x [M, K] by the weight where it is now, both contiguous, for callers who
        repeat it on a CPU; None if this module does more than multiply.
        """
        if self._rounds_before or self._has_bias:
            return None
        if isinstance(self.layout, BindingLayout):
            return self.layout.product_by(self._packed)
        return lambda x: self.layout.matmul(x, self._packed).contiguous()

    def call_of_rows(self, x: int, y: int) -> Call | None:
        """Return the compiled call of the same product, x and y known by their places in the step's numbers;
        None if there is none.
        """
        if self._rounds_before or self._has_bias or not isinstance(self.layout, CallLayout):
            return None
        return self.layout.call_by(self._packed, x, y)

    def extra_repr(self) -> str:
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, layout={self._packed.layout}"
        )
        return text if self.input_format is None else f"{text}, input={self.input_format.label}"


def packed_layers(model: nn.Module) -> dict[str, int]:
    """Return how many packed weights a model has of each layout and shape, by names such as `swap_ab
    4096x4096`.
    """
    found: Counter[str] = Counter()
    for module in model.modules():
        packed = getattr(module, "packed", None)
        for weight in packed.values() if isinstance(packed, dict) else [packed]:
            if isinstance(weight, PackedWeight):
                found[f"{weight.layout} {'x'.join(map(str, weight.shape))}"] += 1
    return dict(found)


@cache
def spec_text(spec: WeightFormat) -> str:
    """Return a spec as text, since ops of traced graphs take no other objects."""
    return json.dumps(spec_to_json(spec))


@cache
def spec_of_text(text: str) -> WeightFormat:
    """Return the spec of a text, as the inverse of `spec_text`."""
    return spec_from_json(json.loads(text))


def _packed_product(rows: Tensor, packed: PackedWeight, spec: str) -> Tensor:
    """Compute the product as one op of a traced graph: its arguments are tensors, numbers and names only."""
    return torch.ops.scalegate.packed_matmul(
        rows,
        list(packed.tensors.values()),
        packed.layout,
        spec,
        list(packed.shape),
        " ".join(packed.tensors),
        " ".join(packed.attributes),
        list(packed.attributes.values()),
    )


# The op may write to scratch among the tensors, but restores it before it ends.
@library.custom_op("scalegate::packed_matmul", mutates_args=())
def _packed_matmul(
    x: Tensor,
    tensors: list[Tensor],
    layout: str,
    spec: str,
    shape: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
) -> Tensor:
    """Multiply x [M, K] to [M, N]. Names are one string, separated by spaces, because an op takes no list of
    strings.
    """
    packed = PackedWeight(
        layout,
        spec_of_text(spec),
        (shape[0], shape[1]),
        x.dtype,
        dict(zip(names.split(), tensors, strict=True)),
        dict(zip(attribute_names.split(), attributes, strict=True)),
    )
    return cast(Layout, LAYOUTS[layout]).matmul(x, packed)


@_packed_matmul.register_fake
def _(
    x: Tensor,
    tensors: list[Tensor],
    layout: str,
    spec: str,
    shape: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
) -> Tensor:
    return x.new_empty(x.shape[0], shape[0])
