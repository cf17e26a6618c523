"""torch's INT4 product on the CPU, `_weight_int4pack_mm_for_cpu`, in three layouts with the same codes.

The kernel is fast in bfloat16 only: in float16 and float32 it takes 20 to 60 times as long. For float16 and
float32 activations there are therefore two layouts: one rounds the activations to bfloat16, the other
computes in float32. The chooser times both.

    codes           uint8 [N', K/2], N' = N padded to 16, as `_convert_weight_to_int4pack_for_cpu` makes them
    scale_and_zero  [K/g, N', 2] in the dtype of the computation (`int4_affine.py`)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.int4 import Int4, unpack_nibbles
from ..formats.weight_format import Weight
from .int4_affine import int4_of, pad_rows, refuses_groups, require_int4, scale_and_zero
from .layout import PackedWeight, Problem, Serves

ROW_TILE = 16

# The binding in `torch` is two microseconds quicker a call than the one under `torch.ops.aten`: a third of
# the whole product on a small layer.
_int4_matmul = torch._weight_int4pack_mm_for_cpu


@dataclass(frozen=True)
class CpuInt4:
    """Multiplies in `compute_dtype`; activations of another dtype are cast to it, and the result is cast
    back.
    """

    name: str
    compute_dtype: torch.dtype
    takes: tuple[torch.dtype, ...]
    """The dtypes of activations that the layout serves."""

    @property
    def kernel(self) -> str:
        return f"_weight_int4pack_mm_for_cpu ({str(self.compute_dtype).removeprefix('torch.')})"

    def refuses(self, problem: Problem) -> str | None:
        return Serves((Int4,), "cpu", self.takes).refuses(problem) or refuses_groups(int4_of(problem))

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        weight = require_int4(weight, self.name)
        padded = pad_rows(weight, ROW_TILE)
        tensors = {
            "codes": torch._convert_weight_to_int4pack_for_cpu(unpack_nibbles(padded.codes).int(), 1),
            "scale_and_zero": scale_and_zero(padded, self.compute_dtype),
        }
        attributes = {"group_size": weight.spec.group_size, "padded_rows": padded.shape[0] - weight.shape[0]}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors, attributes)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors, attributes = packed.tensors, packed.attributes
        if packed.dtype is not self.compute_dtype:
            x = x.to(self.compute_dtype)
        y = _int4_matmul(x, tensors["codes"], attributes["group_size"], tensors["scale_and_zero"])
        if attributes["padded_rows"]:
            y = y[:, : packed.shape[0]]
        return y if packed.dtype is self.compute_dtype else y.to(packed.dtype)


CPU_INT4 = CpuInt4("cpu_int4", torch.bfloat16, (torch.bfloat16,))
CPU_INT4_CAST = CpuInt4("cpu_int4_cast", torch.bfloat16, (torch.float16, torch.float32))
CPU_INT4_FLOAT32 = CpuInt4("cpu_int4_float32", torch.float32, (torch.bfloat16, torch.float16, torch.float32))
