"""A linear layer whose weight is packed for one layout; stands where `torch.nn.Linear` stood."""

from collections import Counter

import torch
from torch import Tensor, library, nn

from .all_layouts import LAYOUTS
from .layout import PackedWeight
from .nvfp4 import NVFP4Input


class QuantizedLinear(nn.Module):
    """`y = x @ W.T + bias` with W packed; the packed tensors are the module's buffers.

    x: [..., K] in the packed dtype; y: [..., N] in the same dtype. With an `input_format`, x is rounded to it
    first, whatever the layout: that is the checkpoint's meaning, not a kernel's choice.
    """

    input_global_scale: Tensor

    def __init__(self, packed: PackedWeight, bias: Tensor | None, input_format: NVFP4Input | None = None):
        super().__init__()
        self.layout = LAYOUTS[packed.layout]
        self.out_features, self.in_features = packed.shape
        self._packed = packed
        for name, tensor in packed.tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None
        self._has_bias = bias is not None
        self.input_format = input_format
        if input_format is not None:
            self.register_buffer("input_global_scale", input_format.global_scale, persistent=False)

    @property
    def packed(self) -> PackedWeight:
        """The packed weight as the module holds it now, after any move to another device."""
        return self._packed

    @property
    def dtype(self) -> torch.dtype:
        return self._packed.dtype

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        tensors = {name: getattr(self, name) for name in self._packed.tensors}
        self._packed = PackedWeight(
            self._packed.layout, self._packed.shape, self._packed.dtype, tensors, self._packed.meta
        )
        if self.input_format is not None:
            self.input_format = NVFP4Input(self.input_global_scale, self.input_format.divides)
        return self

    def forward(self, x: Tensor) -> Tensor:
        # On a small model this method's own overhead is a good part of the layer's time. So the packed weight
        # and the bias flag are plain attributes, since a buffer or parameter is looked up four times slower,
        # and the shape that decoders use is written out, since unpacking it costs another microsecond.
        rows = x.reshape(-1, self.in_features).contiguous()
        if self.input_format is not None:
            rows = self.input_format.round(rows)
        if torch.compiler.is_compiling():
            y = _packed_product(rows, self._packed)
        else:
            y = self.layout.matmul(rows, self._packed)
        if self._has_bias and self.bias is not None:
            y.add_(self.bias)
        shape = x.shape
        if len(shape) == 3:
            return y.view(shape[0], shape[1], self.out_features)
        return y.view(*shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        parts = (
            f"in_features={self.in_features}, out_features={self.out_features}, layout={self._packed.layout}"
        )
        return parts if self.input_format is None else f"{parts}, input=NVFP4"


def packed_layers(model: nn.Module) -> dict[str, int]:
    """How many packed linears a model has of each layout and shape, as `swap_ab 4096x4096`."""
    packed = (module.packed for module in model.modules() if isinstance(module, QuantizedLinear))
    return dict(Counter(f"{one.layout} {one.shape[0]}x{one.shape[1]}" for one in packed))


def _packed_product(rows: Tensor, packed: PackedWeight) -> Tensor:
    """The product as one op that a traced graph can hold: tensors, numbers and names only."""
    return torch.ops.scalegate.packed_matmul(
        rows,
        list(packed.tensors.values()),
        packed.layout,
        list(packed.shape),
        " ".join(packed.tensors),
        " ".join(packed.meta),
        list(packed.meta.values()),
    )


# Scratch among the tensors may be written, but is as it was when the product is done.
@library.custom_op("scalegate::packed_matmul", mutates_args=())
def _packed_matmul(
    x: Tensor,
    tensors: list[Tensor],
    layout: str,
    shape: list[int],
    names: str,
    meta_names: str,
    meta: list[int],
) -> Tensor:
    """x [M, K] → [M, N]; names stand in one string, separated by spaces: an op takes no list of strings."""
    packed = PackedWeight(
        layout,
        (shape[0], shape[1]),
        x.dtype,
        dict(zip(names.split(), tensors, strict=True)),
        dict(zip(meta_names.split(), meta, strict=True)),
    )
    return LAYOUTS[layout].matmul(x, packed)


@_packed_matmul.register_fake
def _(
    x: Tensor,
    tensors: list[Tensor],
    layout: str,
    shape: list[int],
    names: str,
    meta_names: str,
    meta: list[int],
) -> Tensor:
    return x.new_empty(x.shape[0], shape[0])
