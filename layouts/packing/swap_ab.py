"""Our own INT4 layout: the weight in the order of the matrix unit's registers, unpacked without conversions.

The bytes, and why they are fast, are described in `kernels/int4/packing.py`; this file has the layouts that
read them. Not for the CPU.

    swap_ab            fastest: how K is split depends on the number of rows of x
    swap_ab_invariant  batch-invariant: a row's bits do not depend on the other rows

The two layouts run on Hopper alone (`hopper.py`).
"""

import torch
from torch import Tensor

from ...kernels.hopper.packed_operand import PackedOperand
from ...kernels.int4 import packing
from ...kernels.int4.decoder import Int4Decoder
from ..formats.int4 import Int4, unpack_nibbles
from ..formats.weight_format import Weight
from .hopper import HopperLayout
from .int4_affine import int4_of, require_int4
from .layout import PackedWeight, Problem

GROUP_SIZES = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)


class Int4Packing:
    """INT4 for the Hopper kernels."""

    format = Int4
    kernel_prefix = Int4Decoder.name
    dtypes = DTYPES

    def refuses(self, problem: Problem) -> str | None:
        return refuses_groups(int4_of(problem).group_size)

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
        weight = require_int4(weight, "swap_ab")
        group_size = weight.spec.group_size
        tensors = {
            "words": packing.pack_words(unpack_nibbles(weight.codes)),
            "scale_words": packing.pack_scales(weight.scale, weight.zero_point, group_size, dtype),
        }
        fractional = int(not weight.spec.has_integer_zero)
        return tensors, {"group_size": min(group_size, 128), "fractional": fractional}

    def operand(self, packed: PackedWeight) -> PackedOperand:
        tensors, attributes = packed.tensors, packed.attributes
        half = packed.dtype == torch.float16
        decoder = Int4Decoder(half, attributes["group_size"], bool(attributes["fractional"]))
        return PackedOperand(tensors["words"], tensors["scale_words"], tensors["semaphores"], decoder)


PACKING = Int4Packing()


def refuses_groups(group_size: int) -> str | None:
    """Return why the kernels refuse a group size; None if it divides a tile of 128 columns or is a multiple
    of 128."""
    if group_size in GROUP_SIZES or group_size % 128 == 0:
        return None
    return f"takes groups of 32, 64 or a multiple of 128, not {group_size}"


SWAP_AB = HopperLayout("swap_ab", PACKING, batch_invariant=False)
SWAP_AB_INVARIANT = HopperLayout("swap_ab_invariant", PACKING, batch_invariant=True)
