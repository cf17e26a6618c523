"""A linear layer whose weight is packed for one layout; stands where `torch.nn.Linear` stood."""

import torch
from torch import Tensor, nn

from .all_layouts import LAYOUTS
from .layout import PackedWeight


class QuantizedLinear(nn.Module):
    """`y = x @ W.T + bias` with W packed; the packed tensors are the module's buffers.

    x: [..., K] in the packed dtype; y: [..., N] in the same dtype.
    """

    def __init__(self, packed: PackedWeight, bias: Tensor | None):
        super().__init__()
        self.layout = LAYOUTS[packed.layout]
        self.out_features, self.in_features = packed.shape
        self._packed = packed
        for name, tensor in packed.tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None
        self._has_bias = bias is not None

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
        return self

    def forward(self, x: Tensor) -> Tensor:
        # On a small model this method's own overhead is a good part of the layer's time. So the packed weight
        # and the bias flag are plain attributes, since a buffer or parameter is looked up four times slower,
        # and the shape that decoders use is written out, since unpacking it costs another microsecond.
        rows = x.reshape(-1, self.in_features).contiguous()
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
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, layout={self._packed.layout}"
        )


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
@torch.library.custom_op("scalegate::packed_matmul", mutates_args=())
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
