"""humming's JIT-compiled CUDA kernels for INT4, where the package is installed.

Written against humming-kernels 0.1.19, its functions rather than its module.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .installed import installed_package
from .int4 import Int4Weight, pack_nibbles
from .int4_affine import require_int4
from .layout import PackedWeight, Problem, QuantizedWeight

PACKAGE = "humming-kernels"
LOCKS = 2048
"""Stream-K's counters, as many as humming's own module holds."""
ROW_MULTIPLE, COLUMN_MULTIPLE = 256, 128
GROUP_SIZES = (32, 64, 128)


class Humming:
    """bfloat16 and float16, integer and fractional zeros."""

    name = "humming"
    kernel = "humming_gemm"

    def refuses(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda":
            return f"runs on CUDA, not on {problem.device.type}"
        if problem.weight_format is not Int4Weight:
            return f"takes Int4Weight, not {problem.weight_format.__name__}"
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"does not take {str(problem.dtype).removeprefix('torch.')} activations"
        if problem.n % ROW_MULTIPLE or problem.k % COLUMN_MULTIPLE or problem.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            return f"needs N divisible by {ROW_MULTIPLE}, K by {COLUMN_MULTIPLE}, groups of {sizes}"
        return installed_package(PACKAGE)

    def pack(self, weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
        from humming.transform import transform_humming_tensors

        weight = require_int4(weight, self.name)
        n, k = weight.shape
        device = weight.codes.device
        integer = weight.has_integer_zero
        tensors = {
            # Eight nibbles a word, the lowest k in the lowest: our bytes, read as little-endian int32.
            "weight": weight.codes.contiguous().view(torch.int32),
            "weight_scale": weight.scale.to(dtype).contiguous(),
            "zero_point": _packed_zeros(weight) if integer else weight.zero_point.to(dtype).contiguous(),
        }
        with torch.cuda.device(device):
            config = _layer_config(n, k, weight.group_size, integer, dtype, device)
            packed = dict(transform_humming_tensors(config, tensors))
        packed["locks"] = torch.zeros(LOCKS, dtype=torch.int32, device=device)
        meta = {"group_size": weight.group_size, "integer_zero": int(integer)}
        return PackedWeight(self.name, weight.shape, dtype, packed, meta)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        from humming.forward import humming_forward

        meta = packed.meta
        config = _layer_config(
            *packed.shape, meta["group_size"], bool(meta["integer_zero"]), packed.dtype, x.device
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
