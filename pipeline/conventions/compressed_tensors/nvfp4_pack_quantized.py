"""NVFP4 in compressed-tensors, `nvfp4-pack-quantized`: weights alone, or activations in NVFP4 as well."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.nvfp4 import GROUP_SIZE, NVFP4, NVFP4Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..nvfp4_tensors import NVFP4Tensors
from .scheme import SCHEMES

PACKED = ".weight_packed"
WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": GROUP_SIZE,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}
INPUTS = WEIGHTS | {"dynamic": "local"}
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

    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, NVFP4) else f"{self.format} cannot store {spec.label}"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if not isinstance(weight, NVFP4Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec)}")
        return TENSORS.written(module, weight, inputs)

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        return dict(WEIGHTS)

    def inputs_config(self, spec: WeightFormat) -> dict[str, Any] | None:
        return dict(INPUTS) if isinstance(spec, NVFP4) and spec.activations else None


def _is_nvfp4(activations: Mapping[str, Any]) -> bool:
    """Say whether activations have a dynamic E4M3 scale for every 16 channels, and one calibrated fp32
    scale.
    """
    wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}
    return activations.get("group_size") == GROUP_SIZE and wanted.items() <= activations.items()


SCHEMES.add(NVFP4.name, NVFP4PackQuantized())
