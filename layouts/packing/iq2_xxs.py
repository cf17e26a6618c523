"""Our own IQ2_XXS layout for Hopper: weights in the order of the tensor cores' registers, 2.5 bits each.

The byte layout is in `kernels/iq2_xxs/packing.py`. Up to `MAX_DECODED_ROWS` rows of x, the kernels decode the
weight while they multiply, once for every 128 rows. For more rows, the weight is first dequantized to memory.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.hopper.packed_operand import SEMAPHORES, PackedOperand
from ...kernels.iq2_xxs.decoder import IQ2XXSDecoder
from ...kernels.iq2_xxs.dequantize import dequantize
from ...kernels.iq2_xxs.grid import grid
from ...kernels.iq2_xxs.matmul import matmul
from ...kernels.iq2_xxs.packing import pack_scales, pack_words
from ..formats.iq2_xxs import IQ2XXS, IQ2XXSWeight
from ..formats.weight_format import Weight
from .hopper import HOPPER
from .layout import PackedWeight, Problem, Serves
from .trial import trial_refusal

MAX_DECODED_ROWS = 512
SERVES = Serves((IQ2XXS,), "cuda", (torch.bfloat16, torch.float16), capability=HOPPER)
DECODERS = {torch.bfloat16: IQ2XXSDecoder(half=False), torch.float16: IQ2XXSDecoder(half=True)}


class IQ2XXSLayout:
    name = "iq2_xxs"
    kernel = "iq2_xxs_stream_k_kernel"
    run_on = (HOPPER,)
    translated_for = ()

    def refuses(self, problem: Problem) -> str | None:
        refusal = SERVES.refuses(problem)
        if refusal is None and torch.cuda.get_device_capability(problem.device) != HOPPER:
            return "is written for compute capability 9.0 (Hopper)"
        return refusal or trial_refusal(self, problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        if not isinstance(weight, IQ2XXSWeight):
            raise ValueError(f"{self.name} packs IQ2_XXS, not {weight.spec.label}")
        device = weight.words.device
        scales, factor = pack_scales(weight.scales_of_blocks(), dtype)
        tensors = {
            "words": pack_words(weight.indices(), weight.sign_patterns()),
            "scales": scales,
            "factor": factor,
            "codebook": grid(device, dtype).clone(),
            "semaphores": torch.zeros(SEMAPHORES, dtype=torch.int32, device=device),
        }
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def operand(self, packed: PackedWeight) -> PackedOperand:
        tensors = packed.tensors
        words, scales, semaphores = (tensors[name] for name in ("words", "scales", "semaphores"))
        table = tensors["codebook"].view(torch.int32)
        return PackedOperand(words, scales, semaphores, DECODERS[packed.dtype], tensors["factor"], table)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        t, n = packed.tensors, packed.shape[0]
        if len(x) > MAX_DECODED_ROWS:
            weight = dequantize(t["words"], t["scales"], t["factor"], t["codebook"], n, packed.dtype)
            return functional.linear(x, weight)
        x = x.contiguous()
        return matmul(x.clone() if x.data_ptr() % 16 else x, self.operand(packed), n)


IQ2_XXS = IQ2XXSLayout()
