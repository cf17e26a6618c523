"""torch's product of an unquantized weight: cuBLAS on a GPU, oneDNN on a CPU.

Every quantized layout is compared with torch's product.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.unquantized import Unquantized
from ..formats.weight_format import Weight
from .layout import PackedWeight, Problem, Serves


class TorchLinear:
    """Computes `F.linear(x, w)`, for any dtype, device and shape."""

    name = "torch_linear"
    kernel = "F.linear"

    def refuses(self, problem: Problem) -> str | None:
        return Serves((Unquantized,)).refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, {"weight": weight.dequantize(dtype)})

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return functional.linear(x, packed.tensors["weight"])
