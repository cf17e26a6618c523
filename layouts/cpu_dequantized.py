"""A weight dequantized once, when it is packed, for formats that no CPU kernel multiplies by.

It takes the memory of an unquantized weight and serves at its speed: on a CPU, a checkpoint of such a format
saves disk and download, not memory.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .formats.nvfp4 import NVFP4
from .formats.weight_format import Weight
from .layout import PackedWeight, Problem, Serves

FORMATS = (NVFP4,)


class CpuDequantized:
    """`F.linear(x, w)` with w in the activations' dtype: bf16 holds our own NVFP4 weights exactly."""

    name = "cpu_dequantized"
    kernel = "F.linear"

    def refuses(self, problem: Problem) -> str | None:
        return Serves(FORMATS, "cpu").refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, {"weight": weight.dequantize(dtype)})

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return functional.linear(x, packed.tensors["weight"])
