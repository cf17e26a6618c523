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
