"""Weights dequantized once, when they are packed: for formats without a kernel on a device.

Dequantized weights take the memory of unquantized weights and are as fast: such a checkpoint saves disk space
and download, but no memory.

    cpu_dequantized  on a CPU
    cpu_onednn       also reordered into oneDNN's blocks, which saves doing so in every call: the same bits,
                     1.3 to 2.5 times as fast up to M=32 on small layers, on one thread. The order of the
                     bytes makes it faster, not their number. The engine packs unquantized weights so, too
    gpu_dequantized  on a GPU, through cuBLAS. For eight bits only: with fewer, it would take several times
                     the memory that the checkpoint promises
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.fp8 import FP8
from ..formats.int8 import Int8
from ..formats.iq2_xxs import IQ2XXS
from ..formats.mxfp4 import MXFP4
from ..formats.mxfp8 import MXFP8
from ..formats.nvfp4 import NVFP4
from ..formats.unquantized import Unquantized
from ..formats.weight_format import Weight
from .layout import PackedWeight, Problem, Serves

CPU_FORMATS = (NVFP4, MXFP4, IQ2XXS, Int8)


class DequantizeOnce:
    """Computes `F.linear(x, w)` with w in the activations' dtype. bf16 holds our own NVFP4 weights
    exactly.
    """

    kernel = "F.linear"

    def __init__(self, name: str, formats: tuple[type, ...], device: str):
        self.name = name
        self._serves = Serves(formats, device)

    def refuses(self, problem: Problem) -> str | None:
        return self._serves.refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, {"weight": weight.dequantize(dtype)})

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return functional.linear(x, packed.tensors["weight"])


class CpuOneDnn:
    """Multiplies by oneDNN's product with a weight in its own blocks, as torch's compiler uses it for
    constant weights.
    """

    name = "cpu_onednn"
    kernel = "mkldnn::_linear_pointwise"

    def refuses(self, problem: Problem) -> str | None:
        refusal = Serves((Unquantized, *CPU_FORMATS), "cpu", (torch.bfloat16,)).refuses(problem)
        if refusal is None and not _has_bf16_product():
            return "needs oneDNN, and a CPU with AVX-512"
        return refusal

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight.dequantize(dtype), None)
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, {"weight": blocks})

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, packed.tensors["weight"], None, "none", [], "")


def _has_bf16_product() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


CPU_DEQUANTIZED = DequantizeOnce("cpu_dequantized", CPU_FORMATS, "cpu")
GPU_DEQUANTIZED = DequantizeOnce("gpu_dequantized", (Int8, FP8, MXFP8), "cuda")
