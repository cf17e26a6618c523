"""Our own IQ2_XXS layout for Hopper: weights in the order of the tensor cores' registers, 2.0625 bits each.

What the bytes are is in `kernels/iq2_xxs/packing.py`. Up to `MAX_DECODED_ROWS` rows of x the kernel decodes
the weight as it multiplies, once for every 64 of them; beyond, the weight is dequantized to memory once and
multiplied there.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.iq2_xxs.dequantize import dequantize
from ..kernels.iq2_xxs.grid import grid
from ..kernels.iq2_xxs.matmul import SEMAPHORES, matmul
from ..kernels.iq2_xxs.packing import pack_scales, pack_words
from .formats.iq2_xxs import IQ2XXS, IQ2XXSWeight
from .formats.weight_format import Weight
from .layout import PackedWeight, Problem, Serves

MAX_DECODED_ROWS = 128
SERVES = Serves((IQ2XXS,), "cuda", (torch.bfloat16, torch.float16), capability=(9, 0))


class IQ2XXSLayout:
    name = "iq2_xxs"
    kernel = "iq2_xxs_kernel"

    def refuses(self, problem: Problem) -> str | None:
        return SERVES.refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        if not isinstance(weight, IQ2XXSWeight):
            raise ValueError(f"{self.name} packs IQ2_XXS, not {weight.spec.label}")
        scales = weight.block_scales().flatten(1)
        tensors = {
            "words": pack_words(weight.indices(), weight.sign_patterns(), scales),
            "scales": pack_scales(weight.scale),
            "codebook": grid(weight.words.device, dtype).clone(),
            "semaphores": torch.zeros(SEMAPHORES, dtype=torch.int32, device=weight.words.device),
        }
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors, n = packed.tensors, packed.shape[0]
        operands = tensors["words"], tensors["scales"], tensors["codebook"]
        if len(x) > MAX_DECODED_ROWS:
            return functional.linear(x, dequantize(*operands, n, packed.dtype))
        x = x.contiguous()
        return matmul(x.clone() if x.data_ptr() % 16 else x, *operands, tensors["semaphores"], n)


IQ2_XXS = IQ2XXSLayout()
