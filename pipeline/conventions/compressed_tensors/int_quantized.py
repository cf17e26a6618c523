"""INT8 weights and inputs in compressed-tensors, `int-quantized`: a scale for each row and each token.

The tensors are `weight` int8 [N, K] and `weight_scale` [N, 1]. Inputs are rounded as they come.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.int8 import INT8_INPUTS, PER_TOKEN, WHOLE_ROW, Int8, Int8Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..stored import FLOAT_DTYPES, require_tensor
from .scheme import SCHEMES

WEIGHT, SCALE = ".weight", ".weight_scale"
CODES = (torch.int8,)
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
WEIGHTS = EIGHT_BITS | {"strategy": "channel", "dynamic": False}
INPUTS = EIGHT_BITS | {"strategy": "token", "dynamic": True}
SPEC = Int8(WHOLE_ROW, INT8_INPUTS)


class IntQuantized:
    format = "int-quantized"
    reads = "INT8 int-quantized with inputs in INT8"
    suffix = WEIGHT
    dtypes = CODES

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        is_ours = WEIGHTS.items() <= weights.items() and INPUTS.items() <= inputs.items()
        return group["format"] == self.format and is_ours

    def stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        name, scale = module + WEIGHT, module + SCALE
        n, k = require_tensor(checkpoint, name, CODES).shape
        require_tensor(checkpoint, scale, FLOAT_DTYPES, (n, 1))

        def read() -> Int8Weight:
            return Int8Weight(SPEC, checkpoint.read(name), checkpoint.read(scale))

        return StoredWeight(module, (n, k), SPEC, (name, scale), read, lambda: PER_TOKEN)

    def refuses(self, spec: WeightFormat) -> str | None:
        return None if spec == SPEC else f"{self.format} cannot store {spec.label}"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if not isinstance(weight, Int8Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec)}")
        return {module + WEIGHT: weight.codes, module + SCALE: weight.scale.contiguous()}

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        return dict(WEIGHTS)

    def inputs_config(self, spec: WeightFormat) -> dict[str, Any]:
        return dict(INPUTS)


SCHEMES.add("int8 with inputs", IntQuantized())
