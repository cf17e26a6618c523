"""NVFP4 in compressed-tensors, `nvfp4-pack-quantized`: read, with its activations in NVFP4 or left alone."""

from collections.abc import Mapping
from typing import Any

from ....layouts.formats.nvfp4 import GROUP_SIZE, NVFP4
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..nvfp4_tensors import NVFP4Tensors
from .scheme import SCHEMES

PACKED = ".weight_packed"
TENSORS = NVFP4Tensors(PACKED, ".weight_scale", ".weight_global_scale", ".input_global_scale", divides=True)


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
        return TENSORS.stored(checkpoint, module, group.get("input_activations") is not None)


def _is_nvfp4(activations: Mapping[str, Any]) -> bool:
    """Whether they have an E4M3 scale per 16 found as they come, and one fp32 scale found beforehand."""
    wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}
    return activations.get("group_size") == GROUP_SIZE and wanted.items() <= activations.items()


SCHEMES.add(NVFP4.name, NVFP4PackQuantized())
