"""The layout for every format: the weight as stored, dequantized again for every product.

Slow. All other layouts are checked against `dequantize`, which serves only if every other layout refuses.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.unquantized import Unquantized
from ..formats.weight_format import Weight, weight_of
from .layout import IS_FOR, PackedWeight, Problem, Serves


class Dequantize:
    """Computes `F.linear(x, weight.dequantize())`: any format, dtype, device and shape."""

    name = "dequantize"
    kernel = "dequantize + linear"

    def refuses(self, problem: Problem) -> str | None:
        if isinstance(problem.spec, Unquantized):
            return f"{IS_FOR} quantized weights"
        return Serves().refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, weight.tensors())

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return functional.linear(x, weight_of(packed.spec, packed.tensors).dequantize(packed.dtype))
