"""Our own INT4 layout: the weight in the order of the matrix unit's registers, unpacked without conversions.

What the bytes are and why they are fast is in `kernels/int4/swap_ab.py`; here are the layouts that read them.
Not for the CPU.

    swap_ab            Hopper, stream-K; tile and split by the bucket of M and the shape
    swap_ab_invariant  Hopper, split-K; one order of summation for every M: a row's bits are its own
    swap_ab_portable   any GPU from compute capability 8.0 on, through plain Triton; slow, and not registered
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.hopper import gemm
from ..kernels.hopper.packed_operand import SEMAPHORES, PackedOperand
from ..kernels.int4 import swap_ab
from ..kernels.int4.decoder import Int4Decoder
from .formats.int4 import Int4, unpack_nibbles
from .formats.weight_format import Weight
from .int4_affine import int4_of, require_int4
from .layout import Numerics, PackedWeight, Problem, Serves

GROUP_SIZES = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
HOPPER = (9, 0)
PORTABLE = (8, 0)


class SwapAB:
    """The Hopper kernels on the packed bytes."""

    def __init__(self, name: str, batch_invariant: bool):
        self.name = name
        self.kernel = "int4_invariant_kernel" if batch_invariant else "int4_stream_k_kernel"
        self.batch_invariant = batch_invariant

    def refuses(self, problem: Problem) -> str | None:
        numerics: tuple[Numerics, ...] = ("tuned", "pin", "per-token") if self.batch_invariant else ("tuned",)
        refusal = refuses(problem, numerics, PORTABLE)
        if refusal is None and torch.cuda.get_device_capability(problem.device) != HOPPER:
            return "is written for compute capability 9.0 (Hopper)"
        return refusal

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        packed = pack(self.name, weight, dtype)
        semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device=packed.tensors["words"].device)
        return replace(packed, tensors={**packed.tensors, "semaphores": semaphores})

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        x = x.contiguous()
        if x.data_ptr() % 16:
            x = x.clone()
        return gemm.matmul(x, operand_of(packed), packed.shape[0], self.batch_invariant)


def operand_of(packed: PackedWeight) -> PackedOperand:
    """The packed weight as the Hopper kernels take it."""
    attributes = packed.attributes
    half = packed.dtype == torch.float16
    decoder = Int4Decoder(half, attributes["group_size"], bool(attributes["fractional"]))
    words, scale_words, semaphores = (packed.tensors[one] for one in ("words", "scale_words", "semaphores"))
    return PackedOperand(words, scale_words, semaphores, decoder)


class SwapABPortable:
    """The plain Triton kernel on the packed bytes."""

    name = "swap_ab_portable"
    kernel = "int4_swap_ab_kernel"

    def refuses(self, problem: Problem) -> str | None:
        return refuses(problem, ("tuned",), PORTABLE)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        return pack(self.name, weight, dtype)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors, attributes = packed.tensors, packed.attributes
        return swap_ab.matmul(
            x.contiguous(), tensors["words"], tensors["scale_words"],
            packed.shape[0], attributes["group_size"], bool(attributes["fractional"]),
        )  # fmt: skip


def refuses(problem: Problem, numerics: tuple[Numerics, ...], capability: tuple[int, int]) -> str | None:
    """What every kernel on these bytes refuses."""
    refusal = Serves((Int4,), "cuda", DTYPES, numerics=numerics, capability=capability).refuses(problem)
    return refusal or refuses_groups(int4_of(problem).group_size)


def refuses_groups(group_size: int) -> str | None:
    """Groups that do not divide a tile of 128 columns and are not divided by it."""
    if group_size in GROUP_SIZES or group_size % 128 == 0:
        return None
    return f"takes groups of 32, 64 or a multiple of 128, not {group_size}"


def pack(layout: str, weight: Weight, dtype: torch.dtype) -> PackedWeight:
    weight = require_int4(weight, layout)
    group_size = weight.spec.group_size
    tensors = {
        "words": swap_ab.pack_words(unpack_nibbles(weight.codes)),
        "scale_words": swap_ab.pack_scales(weight.scale, weight.zero_point, group_size, dtype),
    }
    attributes = {"group_size": min(group_size, 128), "fractional": int(not weight.spec.has_integer_zero)}
    return PackedWeight(layout, weight.spec, weight.shape, dtype, tensors, attributes)


SWAP_AB = SwapAB("swap_ab", batch_invariant=False)
SWAP_AB_INVARIANT = SwapAB("swap_ab_invariant", batch_invariant=True)
SWAP_AB_PORTABLE = SwapABPortable()
