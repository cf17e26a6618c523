"""Our own INT4 layout: the weight in the order of the matrix unit's registers, unpacked without conversions.

What the bytes are and why they are fast is in `kernels/int4/swap_ab.py`; here are the layouts that read them.
Not for the CPU.

    swap_ab            Hopper, stream-K; tile and split by the bucket of M and the shape
    swap_ab_invariant  Hopper, split-K; one order of summation for every M: a row's bits are its own
    swap_ab_portable   any GPU from compute capability 8.0 on, through plain Triton; slow, and not registered
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.int4 import hopper, swap_ab
from ..kernels.int4.tile import SEMAPHORES
from .int4 import Int4Weight, unpack_nibbles
from .int4_affine import require_int4
from .layout import PackedWeight, Problem, QuantizedWeight

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
        refusal = refuses_format(problem)
        if refusal is None and torch.cuda.get_device_capability(problem.device) != HOPPER:
            return "is written for compute capability 9.0 (Hopper)"
        return refusal

    def pack(self, weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
        packed = pack(self.name, weight, dtype)
        semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device=packed.tensors["words"].device)
        tensors = {**packed.tensors, "semaphores": semaphores}
        return PackedWeight(packed.layout, packed.shape, packed.dtype, tensors, packed.meta)

    def join(self, packed: Sequence[PackedWeight]) -> PackedWeight | None:
        return join(packed)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors, meta = packed.tensors, packed.meta
        x = x.contiguous()
        if x.data_ptr() % 16:
            x = x.clone()
        rest = packed.shape[0], meta["group_size"], bool(meta["fractional"])
        operands = x, tensors["words"], tensors["scale_words"], tensors["semaphores"]
        return hopper.matmul(*operands, *rest, self.batch_invariant)


class SwapABPortable:
    """The plain Triton kernel on the packed bytes."""

    name = "swap_ab_portable"
    kernel = "int4_swap_ab_kernel"

    def refuses(self, problem: Problem) -> str | None:
        refusal = refuses_format(problem)
        if refusal is None and torch.cuda.get_device_capability(problem.device) < PORTABLE:
            return "needs compute capability 8.0"
        return refusal

    def pack(self, weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
        return pack(self.name, weight, dtype)

    def join(self, packed: Sequence[PackedWeight]) -> PackedWeight | None:
        return join(packed)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors, meta = packed.tensors, packed.meta
        return swap_ab.matmul(
            x.contiguous(), tensors["words"], tensors["scale_words"],
            packed.shape[0], meta["group_size"], bool(meta["fractional"]),
        )  # fmt: skip


def refuses_format(problem: Problem) -> str | None:
    """What every kernel on these bytes refuses."""
    if problem.weight_format is not Int4Weight:
        return f"takes Int4Weight, not {problem.weight_format.__name__}"
    if problem.device.type != "cuda":
        return f"runs on CUDA, not on {problem.device.type}"
    if problem.dtype not in DTYPES:
        return f"takes bfloat16 or float16 activations, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.group_size not in GROUP_SIZES and problem.group_size % 128:
        return f"takes groups of 32, 64 or a multiple of 128, not {problem.group_size}"
    return None


def pack(layout: str, weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
    weight = require_int4(weight, layout)
    tensors = {
        "words": swap_ab.pack_words(unpack_nibbles(weight.codes)),
        "scale_words": swap_ab.pack_scales(weight.scale, weight.zero_point, weight.group_size, dtype),
    }
    meta = {"group_size": min(weight.group_size, 128), "fractional": int(not weight.has_integer_zero)}
    return PackedWeight(layout, weight.shape, dtype, tensors, meta)


def join(packed: Sequence[PackedWeight]) -> PackedWeight | None:
    """Tiles of rows one after another: every weight but the last must fill its own."""
    if any(one.shape[0] % swap_ab.TILE for one in packed[:-1]):
        return None
    tensors = {
        **packed[0].tensors,
        "words": torch.cat([one.tensors["words"] for one in packed]),
        "scale_words": torch.cat([one.tensors["scale_words"] for one in packed], dim=1),
    }
    shape = sum(one.shape[0] for one in packed), packed[0].shape[1]
    return PackedWeight(packed[0].layout, shape, packed[0].dtype, tensors, packed[0].meta)


SWAP_AB = SwapAB("swap_ab", batch_invariant=False)
SWAP_AB_INVARIANT = SwapAB("swap_ab_invariant", batch_invariant=True)
SWAP_AB_PORTABLE = SwapABPortable()
