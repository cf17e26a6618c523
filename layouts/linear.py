"""A linear layer whose weight is packed for one layout; stands where `torch.nn.Linear` stood."""

import torch
from torch import Tensor, nn

from .layout import LAYOUTS, PackedWeight


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
        y = self.layout.matmul(x.reshape(-1, self.in_features), self._packed)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, layout={self._packed.layout}"
        )
