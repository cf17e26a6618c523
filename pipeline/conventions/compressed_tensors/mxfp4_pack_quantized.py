"""MXFP4 in compressed-tensors, `mxfp4-pack-quantized`, weights alone.

The tensors are `weight_packed` uint8 [N, K/2], low nibble even, and `weight_scale` uint8 [N, K/32], E8M0.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....base.errors import UserError
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.mxfp4 import GROUP_SIZE, MXFP4, NAN, MXFP4Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..stored import refuse_shape, require_tensor
from .scheme import SCHEMES

PACKED, SCALE = ".weight_packed", ".weight_scale"
BYTES = (torch.uint8,)
WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": GROUP_SIZE,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
    "zp_dtype": "torch.uint8",
}


class MXFP4PackQuantized:
    format = "mxfp4-pack-quantized"
    reads = "MXFP4 mxfp4-pack-quantized"
    suffix = PACKED
    dtypes = None

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        weights = group.get("weights") or {}
        kind = weights.get("num_bits"), weights.get("type"), group["format"]
        return kind == (4, "float", self.format) and group.get("input_activations") is None

    def stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        packed, scale, spec = module + PACKED, module + SCALE, MXFP4()
        n, half = require_tensor(checkpoint, packed, BYTES).shape
        k = half * 2
        refuse_shape(checkpoint, packed, spec, n, k)
        require_tensor(checkpoint, scale, BYTES, (n, k // GROUP_SIZE))

        def read() -> MXFP4Weight:
            scales = checkpoint.read(scale)
            if bool((scales == NAN).any()):
                raise UserError(
                    f"{checkpoint.source}: {scale} holds NaN. Download it again, or quantize again"
                )
            return MXFP4Weight(spec, checkpoint.read(packed), scales)

        return StoredWeight(module, (n, k), spec, (packed, scale), read)

    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, MXFP4) else f"{self.format} cannot store {spec.label}"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if not isinstance(weight, MXFP4Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec)}")
        return {module + PACKED: weight.codes, module + SCALE: weight.scale}

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        return dict(WEIGHTS)

    def inputs_config(self, spec: WeightFormat) -> dict[str, Any] | None:
        return None


SCHEMES.add(MXFP4.name, MXFP4PackQuantized())
