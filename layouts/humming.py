"""humming's JIT-compiled CUDA kernels for INT4, where the package is installed.

Written against humming-kernels 0.1.19, its functions rather than its module.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .formats.int4 import Int4, Int4Weight, pack_nibbles
from .formats.weight_format import Weight
from .installed import installed_package
from .int4_affine import int4_of, require_int4
from .layout import PackedWeight, Problem, Serves

PACKAGE = "humming-kernels"
SERVES = Serves((Int4,), "cuda", (torch.bfloat16, torch.float16))
LOCKS = 2048
"""Stream-K's counters, as many as humming's own module holds."""
ROW_MULTIPLE, COLUMN_MULTIPLE = 256, 128
GROUP_SIZES = (32, 64, 128)


class Humming:
    """bfloat16 and float16, integer and fractional zeros."""

    name = "humming"
    kernel = "humming_gemm"

    def refuses(self, problem: Problem) -> str | None:
        refusal = SERVES.refuses(problem)
        if refusal is not None:
            return refusal
        supported = int4_of(problem).group_size in GROUP_SIZES
        if problem.n % ROW_MULTIPLE or problem.k % COLUMN_MULTIPLE or not supported:
            sizes = ", ".join(map(str, GROUP_SIZES))
            return f"needs N divisible by {ROW_MULTIPLE}, K by {COLUMN_MULTIPLE}, groups of {sizes}"
        return installed_package(PACKAGE)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        from humming.transform import transform_humming_tensors

        weight = require_int4(weight, self.name)
        n, k = weight.shape
        device = weight.codes.device
        integer = weight.spec.has_integer_zero
        tensors = {
            # Eight nibbles a word, the lowest k in the lowest: our bytes, read as little-endian int32.
            "weight": weight.codes.contiguous().view(torch.int32),
            "weight_scale": weight.scale.to(dtype).contiguous(),
            "zero_point": _packed_zeros(weight) if integer else weight.zero_point.to(dtype).contiguous(),
        }
        with torch.cuda.device(device):
            config = _layer_config(n, k, weight.spec.group_size, integer, dtype, device)
            packed = dict(transform_humming_tensors(config, tensors))
        packed["locks"] = torch.zeros(LOCKS, dtype=torch.int32, device=device)
        attributes = {"group_size": weight.spec.group_size, "integer_zero": int(integer)}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, packed, attributes)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        from humming.forward import humming_forward

        attributes = packed.attributes
        config = _layer_config(
            packed.shape[0],
            packed.shape[1],
            attributes["group_size"],
            bool(attributes["integer_zero"]),
            packed.dtype,
            x.device,
        )
        return humming_forward(config, inputs=x, **packed.tensors)


def _packed_zeros(weight: Int4Weight) -> Tensor:
    """int32 [N/8, K/g]: the zeros of eight rows a word, the first row's in the lowest nibble."""
    return pack_nibbles(weight.zero_point.t().contiguous()).view(torch.int32).t().contiguous()


@cache
def _layer_config(
    n: int, k: int, group_size: int, integer_zero: bool, dtype: torch.dtype, device: torch.device
) -> Any:
    """humming's description of a layer; it depends on nothing but these."""
    from humming.layer import HummingLayerMeta
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config

    schema = HummingWeightSchema(
        b_dtype="uint4",
        weight_scale_group_size=group_size,
        has_zero_point=True,
        is_fp_zero_point=not integer_zero,
    )
    config = prepare_layer_config(
        shape_n=n, shape_k=k, weight_schema=schema, torch_dtype=dtype, device=device
    )
    # This form of it keeps its text, which every call asks for.
    return HummingLayerMeta.from_layer_config(config)
