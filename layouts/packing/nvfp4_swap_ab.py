"""Our own NVFP4 layout for Hopper: decoded without conversion instructions, for activations in bf16.

The byte layout is in `kernels/nvfp4/packing.py`; the layout classes are in `hopper.py`.
"""

import torch
from torch import Tensor

from ...kernels.hopper.packed_operand import PackedOperand
from ...kernels.nvfp4 import packing
from ...kernels.nvfp4.decoder import NVFP4Decoder
from ..formats.int4 import unpack_nibbles
from ..formats.nvfp4 import NVFP4, NVFP4Weight
from ..formats.weight_format import Weight
from .hopper import HopperLayout
from .layout import PackedWeight, Problem

DECODER = NVFP4Decoder(half=False)


class NVFP4Packing:
    """NVFP4 for the Hopper kernels."""

    format = NVFP4
    kernel_prefix = NVFP4Decoder.name
    dtypes = (torch.bfloat16,)

    def refuses(self, problem: Problem) -> str | None:
        return problem.spec.refuses(problem.n, problem.k)

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
        if not isinstance(weight, NVFP4Weight):
            raise TypeError(f"layout nvfp4_swap_ab packs NVFP4Weight, not {type(weight).__name__}")
        words, scales = packing.pack(unpack_nibbles(weight.codes), weight.scale)
        factor = weight.global_scale.float().reshape(1) * packing.FACTOR
        return {"words": words, "scales": scales, "factor": factor}, {}

    def operand(self, packed: PackedWeight) -> PackedOperand:
        tensors = packed.tensors
        words, scales, semaphores = (tensors[name] for name in ("words", "scales", "semaphores"))
        return PackedOperand(words, scales, semaphores, DECODER, tensors["factor"])


PACKING = NVFP4Packing()
NVFP4_SWAP_AB = HopperLayout("nvfp4_swap_ab", PACKING, batch_invariant=False)
NVFP4_SWAP_AB_INVARIANT = HopperLayout("nvfp4_swap_ab_invariant", PACKING, batch_invariant=True)
