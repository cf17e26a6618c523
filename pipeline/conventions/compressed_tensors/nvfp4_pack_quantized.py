"""NVFP4 in compressed-tensors, `nvfp4-pack-quantized`: read, with its activations in NVFP4 or left alone."""

from collections.abc import Mapping
from typing import Any

import torch

from ....layouts.formats.nvfp4 import GROUP_SIZE, NVFP4, NVFP4Input, NVFP4Weight
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..stored import positive_scalar, refuse_shape, require_tensor, scalar_shape
from .scheme import SCHEMES

PACKED = ".weight_packed"


class NVFP4PackQuantized:
    format = "nvfp4-pack-quantized"
    reads = "NVFP4 nvfp4-pack-quantized"
    suffix = PACKED
    dtypes = None

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        weights, activations = group.get("weights") or {}, group.get("input_activations")
        kind = weights.get("num_bits"), weights.get("type"), group["format"]
        return kind == (4, "float", self.format) and (activations is None or _is_nvfp4(activations))

    def stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        return _stored(checkpoint, module, group.get("input_activations") is not None)


def _is_nvfp4(activations: Mapping[str, Any]) -> bool:
    """Whether they have an E4M3 scale per 16 found as they come, and one fp32 scale found beforehand."""
    wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}
    return activations.get("group_size") == GROUP_SIZE and wanted.items() <= activations.items()


def _stored(checkpoint: Checkpoint, module: str, quantizes_input: bool) -> StoredWeight:
    packed, scale = module + PACKED, f"{module}.weight_scale"
    global_scale = f"{module}.weight_global_scale"
    n, half = require_tensor(checkpoint, packed, (torch.uint8,)).shape
    k = half * 2
    spec = NVFP4()
    refuse_shape(checkpoint, packed, spec, n, k)
    require_tensor(checkpoint, scale, (torch.float8_e4m3fn,), (n, k // GROUP_SIZE))
    require_tensor(checkpoint, global_scale, (torch.float32,))
    scalar_shape(checkpoint, global_scale)
    input_scale = f"{module}.input_global_scale"
    if quantizes_input:
        require_tensor(checkpoint, input_scale, (torch.float32,))
        scalar_shape(checkpoint, input_scale)
    names = [packed, scale, global_scale]
    names += [input_scale] if input_scale in checkpoint.tensors else []
    shared = (global_scale, input_scale) if quantizes_input else (global_scale,)

    # Both global scales are stored as divisors.
    def read() -> NVFP4Weight:
        multiplier = positive_scalar(checkpoint, global_scale).reciprocal()
        return NVFP4Weight(spec, checkpoint.read(packed), checkpoint.read(scale), multiplier)

    def read_input() -> NVFP4Input:
        return NVFP4Input(positive_scalar(checkpoint, input_scale), divides=True)

    inputs = read_input if quantizes_input else None
    return StoredWeight(module, (n, k), spec, tuple(names), read, inputs, shared)


SCHEMES.add(NVFP4.name, NVFP4PackQuantized())
