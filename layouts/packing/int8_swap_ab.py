"""Our own INT8 layout for Hopper: two INT4 planes, multiplied by the INT4 kernels.

The byte layout and its cost are in `kernels/int4/planes.py`; the layout classes are in `hopper.py`.
"""

import torch
from torch import Tensor

from ...kernels.hopper.packed_operand import PackedOperand
from ...kernels.int4 import planes
from ...kernels.int4.decoder import Int4Decoder
from ..formats.int8 import Int8, Int8Weight
from ..formats.weight_format import Weight
from .hopper import HopperLayout
from .layout import PackedWeight, Problem


class Int8Packing:
    """INT8 for the Hopper kernels."""

    format = Int8
    kernel_prefix = Int4Decoder.name
    dtypes = (torch.bfloat16, torch.float16)

    def refuses(self, problem: Problem) -> str | None:
        if problem.k % planes.COLUMN_MULTIPLE:
            return f"takes a K that is a multiple of {planes.COLUMN_MULTIPLE}, not {problem.k}"
        return None

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
        if not isinstance(weight, Int8Weight):
            raise TypeError(f"layout int8_swap_ab packs Int8Weight, not {type(weight).__name__}")
        words, scale_words = planes.pack(weight.codes, weight.scale, dtype)
        group_size = weight.shape[1] // weight.scale.shape[1]
        return {"words": words, "scale_words": scale_words}, {"group_size": group_size}

    def operand(self, packed: PackedWeight) -> PackedOperand:
        tensors = packed.tensors
        decoder = planes.decoder(packed.attributes["group_size"], packed.dtype == torch.float16)
        return PackedOperand(tensors["words"], tensors["scale_words"], tensors["semaphores"], decoder)


PACKING = Int8Packing()
INT8_SWAP_AB = HopperLayout("int8_swap_ab", PACKING, batch_invariant=False)
INT8_SWAP_AB_INVARIANT = HopperLayout("int8_swap_ab_invariant", PACKING, batch_invariant=True)
