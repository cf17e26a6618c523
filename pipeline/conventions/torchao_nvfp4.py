"""torchao's NVFP4Tensor with weights alone, as NVFP4WeightOnlyConfig makes it: read and written."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.nvfp4 import GROUP_SIZE, NVFP4, NVFP4Weight
from ...layouts.formats.weight_format import Weight, WeightFormat
from ..checkpoints.checkpoint import Checkpoint
from .convention import StoredWeight
from .stored import refuse_shape, require_tensor, scalar_shape
from .torchao_bytes import swizzle, swizzled_shape, unswizzle
from .torchao_form import FORMS, READERS


class SwizzledNVFP4:
    kind = "NVFP4Tensor"

    def refuses(self, spec: WeightFormat) -> str | None:
        if spec == NVFP4():
            return None
        return "torchao's NVFP4 is written with weights alone"

    def tensors(self, module: str, weight: Weight) -> dict[str, Tensor]:
        if not isinstance(weight, NVFP4Weight):
            raise ValueError(f"{module}: {self.kind} holds NVFP4, not {weight.spec.label}")
        return {
            f"{module}._weight_qdata": weight.codes,
            f"{module}._weight_scale": swizzle(weight.scale),
            f"{module}._weight_per_tensor_scale": weight.global_scale,
        }

    def described(self, spec: WeightFormat, shape: tuple[int, int]) -> dict[str, Any]:
        # The dtype is what torchao calls the weight's own; readers cast it to the model's.
        data = {
            "is_swizzled_scales": True,
            "use_triton_kernel": False,
            "act_quant_kwargs": None,
            "block_size": GROUP_SIZE,
            "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
        }
        return {"_data": data, "_tensor_data_names": ["per_tensor_scale", "qdata", "scale"]}

    def config(self, spec: WeightFormat) -> dict[str, Any]:
        data = {"use_dynamic_per_tensor_scale": True}
        return {"_type": "NVFP4WeightOnlyConfig", "_version": 1, "_data": data}

    def bits_per_weight(self, spec: WeightFormat, n: int, k: int) -> float:
        return spec.bits_per_weight(n, k)


def _nvfp4(checkpoint: Checkpoint, module: str, data: Mapping[str, Any]) -> StoredWeight:
    codes, scale = f"{module}._weight_qdata", f"{module}._weight_scale"
    global_scale = f"{module}._weight_per_tensor_scale"
    n, half = require_tensor(checkpoint, codes, (torch.uint8,)).shape
    k = half * 2
    spec = NVFP4()
    refuse_shape(checkpoint, codes, spec, n, k)
    if data.get("block_size") != GROUP_SIZE:
        raise UserError(
            f"{checkpoint.source}: {module} has block_size {data.get('block_size')!r}; NVFP4 has {GROUP_SIZE}"
        )
    if data.get("act_quant_kwargs") is not None:
        raise UserError(
            f"{checkpoint.source}: {module} quantizes its activations as well (act_quant_kwargs); "
            "Scalegate reads torchao's NVFP4 only as NVFP4WeightOnlyConfig makes it"
        )
    swizzled = bool(data.get("is_swizzled_scales"))
    expected = swizzled_shape(n, k) if swizzled else (n, k // GROUP_SIZE)
    require_tensor(checkpoint, scale, (torch.float8_e4m3fn,), expected)
    has_global = global_scale in checkpoint.tensors
    if has_global:
        require_tensor(checkpoint, global_scale, (torch.float32,))
        scalar_shape(checkpoint, global_scale)
    shared = (global_scale,) if has_global else ()

    def read() -> NVFP4Weight:
        scales = checkpoint.read(scale)
        multiplier = checkpoint.read(global_scale).reshape(()) if has_global else torch.tensor(1.0)
        rows = unswizzle(scales, n, k // GROUP_SIZE) if swizzled else scales
        return NVFP4Weight(spec, checkpoint.read(codes), rows, multiplier)

    names = (codes, scale, *shared)
    return StoredWeight(module, (n, k), spec, names, read, shared=shared)


FORMS.add(NVFP4.name, SwizzledNVFP4())
READERS.add(SwizzledNVFP4.kind, _nvfp4)
