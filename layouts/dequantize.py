"""The layout that always exists: the weight as its format stores it, dequantized anew for every product.

It is slow, and it is what every other layout is checked against. Not for serving where another fits.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .int4 import Int4Weight
from .layout import PackedWeight, Problem, QuantizedWeight
from .nvfp4 import NVFP4Weight


class Dequantize:
    """`F.linear(x, weight.dequantize())`: any format, dtype, device and shape."""

    name = "dequantize"
    kernel = "dequantize + linear"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def pack(self, weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
        if isinstance(weight, Int4Weight):
            tensors = {"codes": weight.codes, "scale": weight.scale, "zero_point": weight.zero_point}
        else:
            tensors = {"codes": weight.codes, "scale": weight.scale, "global_scale": weight.global_scale}
        return PackedWeight(self.name, weight.shape, dtype, tensors, {"group_size": weight.group_size})

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return functional.linear(x, unpack(packed).dequantize(packed.dtype))


def unpack(packed: PackedWeight) -> QuantizedWeight:
    """The weight that this layout packed; nothing was lost on the way."""
    tensors = packed.tensors
    if "zero_point" in tensors:
        return Int4Weight(
            tensors["codes"], tensors["scale"], tensors["zero_point"], packed.meta["group_size"]
        )
    return NVFP4Weight(tensors["codes"], tensors["scale"], tensors["global_scale"])
