"""humming's JIT-compiled CUDA kernels for INT4 and NVFP4, if the package is installed.

The code is written for humming-kernels 0.1.19, and uses its functions, not its module.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....base.installed import installed_package
from ...formats.int4 import Int4, Int4Weight, pack_nibbles
from ...formats.nvfp4 import NVFP4, NVFP4Weight
from ...formats.weight_format import Weight, WeightFormat
from ..int4_affine import require_int4
from ..layout import PackedWeight, Problem, Serves

PACKAGE = "humming-kernels"
SERVES = Serves((Int4, NVFP4), "cuda", (torch.bfloat16, torch.float16))
LOCKS = 2048
"""Counters for stream-K, as many as humming's own module has."""
ROW_MULTIPLE, COLUMN_MULTIPLE = 256, 128
GROUP_SIZES = (32, 64, 128)


class Humming:
    """Serves bfloat16 and float16; INT4 with integer and fractional zeros."""

    name = "humming"
    kernel = "humming_gemm"

    def refuses(self, problem: Problem) -> str | None:
        refusal = SERVES.refuses(problem)
        if refusal is not None:
            return refusal
        if problem.n % ROW_MULTIPLE or problem.k % COLUMN_MULTIPLE:
            return f"needs N divisible by {ROW_MULTIPLE}, K by {COLUMN_MULTIPLE}"
        if isinstance(problem.spec, Int4) and problem.spec.group_size not in GROUP_SIZES:
            return f"needs groups of {', '.join(map(str, GROUP_SIZES))}"
        return installed_package(PACKAGE)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        from humming.transform import transform_humming_tensors

        device = next(iter(weight.tensors().values())).device
        with torch.cuda.device(device):
            config = _layer_config(*weight.shape, weight.spec, dtype, device)
            packed = dict(transform_humming_tensors(config, _tensors_of(weight, dtype)))
        packed["locks"] = torch.zeros(LOCKS, dtype=torch.int32, device=device)
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, packed)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        from humming.forward import humming_forward

        config = _layer_config(packed.shape[0], packed.shape[1], packed.spec, packed.dtype, x.device)
        return humming_forward(config, inputs=x, **packed.tensors)


def _tensors_of(weight: Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors by humming's names. A word holds eight codes, with the first k in the lowest bits:
    these are our own bytes, read as int32.
    """
    if isinstance(weight, NVFP4Weight):
        return {
            "weight": weight.codes.contiguous().view(torch.int32),
            "weight_scale": weight.scale.contiguous(),
            "weight_scale_2": weight.global_scale.float().reshape(1),
        }
    weight = require_int4(weight, Humming.name)
    integer = weight.spec.has_integer_zero
    return {
        "weight": weight.codes.contiguous().view(torch.int32),
        "weight_scale": weight.scale.to(dtype).contiguous(),
        "zero_point": _packed_zeros(weight) if integer else weight.zero_point.to(dtype).contiguous(),
    }


def _packed_zeros(weight: Int4Weight) -> Tensor:
    """Return int32 [N/8, K/g]: a word holds the zeros of eight rows, with the first row's in the lowest
    nibble.
    """
    return pack_nibbles(weight.zero_point.t().contiguous()).view(torch.int32).t().contiguous()


def _weight_schema(spec: WeightFormat) -> Any:
    from humming import dtypes
    from humming.config.enum import WeightScale2Type, WeightScaleType
    from humming.schema import HummingWeightSchema

    if isinstance(spec, Int4):
        return HummingWeightSchema(
            b_dtype="uint4",
            weight_scale_group_size=spec.group_size,
            has_zero_point=True,
            is_fp_zero_point=not spec.has_integer_zero,
        )
    return HummingWeightSchema(
        b_dtype=dtypes.float4e2m1,
        bs_dtype=dtypes.float8e4m3,
        weight_scale_group_size=16,
        weight_scale_type=WeightScaleType.GROUP,
        weight_scale_2_type=WeightScale2Type.TENSOR,
    )


@cache
def _layer_config(n: int, k: int, spec: WeightFormat, dtype: torch.dtype, device: torch.device) -> Any:
    """Return humming's description of a layer, which depends on nothing but these arguments."""
    from humming.layer import HummingLayerMeta
    from humming.transform import prepare_layer_config

    config = prepare_layer_config(
        shape_n=n, shape_k=k, weight_schema=_weight_schema(spec), torch_dtype=dtype, device=device
    )
    # This form of it keeps its text, which every call asks for.
    return HummingLayerMeta.from_layer_config(config)
