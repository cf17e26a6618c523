"""gemlite's Triton kernels for INT4 on CUDA, if the package is installed.

The code is written for gemlite 0.6.0, whose linear module packs a weight and whose function multiplies.
gemlite autotunes for a bucket of M when an M of that bucket first occurs, so every bucket must be warmed up
before serving.
"""

import torch
from torch import Tensor

from ....base.installed import installed_package
from ...formats.int4 import Int4, unpack_nibbles
from ...formats.weight_format import Weight
from ..int4_affine import int4_of, require_int4
from ..layout import PackedWeight, Problem, Serves

PACKAGE = "gemlite"
TENSORS = ("codes", "scale", "zero", "meta_scale")
"""gemlite's tensor arguments, in its order."""
SERVES = Serves((Int4,), "cuda", (torch.bfloat16, torch.float16))
ROW_MULTIPLE = 128
ARGUMENT = "argument_{:02d}"
MOST_SPLITS, LARGEST_BLOCK, LEAST_COLUMNS = 4, 256, 256
"""What an iteration of its kernels covers: up to 4 blocks of at most one group, or 8 blocks of 32 columns."""


class GemLite:
    """Serves bfloat16 and float16, integer and fractional zeros, and more than one group a row.

    K must be a multiple of the columns that any kernel of gemlite's handles in one iteration. Otherwise, a
    kernel that splits K reads scales past their end in its last iteration and multiplies them by zeros; the
    result is NaN if the memory there holds no finite number.
    """

    name = "gemlite"
    kernel = "gemlite forward_functional"

    def refuses(self, problem: Problem) -> str | None:
        refusal = SERVES.refuses(problem)
        if refusal is not None:
            return refusal
        group_size = int4_of(problem).group_size
        if problem.n % ROW_MULTIPLE or problem.k % 32 or problem.k == group_size:
            return f"needs N divisible by {ROW_MULTIPLE}, K by 32, and more than one group a row"
        columns = max(LEAST_COLUMNS, MOST_SPLITS * min(group_size, LARGEST_BLOCK))
        if problem.k % columns:
            return (
                f"reads scales past their end where K is not a multiple of {columns}, as {problem.k} is not"
            )
        return installed_package(PACKAGE)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        from gemlite.core import TORCH_TO_DTYPE, GemLiteLinear

        weight = require_int4(weight, self.name)
        n, k = weight.shape
        theirs = TORCH_TO_DTYPE[dtype]
        linear = GemLiteLinear(
            W_nbits=4,
            group_size=weight.spec.group_size,
            in_features=k,
            out_features=n,
            input_dtype=theirs,
            output_dtype=theirs,
        )
        # Its other mode multiplies out -zero * scale and rounds it, which costs a quarter of a step.
        linear.pack(
            unpack_nibbles(weight.codes), weight.scale.to(dtype), weight.zero_point.to(dtype), fma_mode=False
        )
        tensors = {
            name: tensor.detach() for name, tensor in zip(TENSORS, linear.get_tensor_args(), strict=True)
        }
        attributes = {
            ARGUMENT.format(index): int(value) for index, value in enumerate(linear.get_meta_args())
        }
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors, attributes)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        # The package registers this operator; `pack` imported it.
        return torch.ops.gemlite.forward_functional(
            x, None, list(packed.tensors.values()), list(packed.attributes.values())
        )
