"""MXFP8 in compressed-tensors, `mxfp8-quantized`: E4M3 weights and inputs, a power of two for every 32.

The tensors are `weight` float8_e4m3fn [N, K] and `weight_scale` uint8 [N, K/32], E8M0; ModelOpt's are the
same. A source in this form is dequantized to 16 bits.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ....layouts.formats.e4m3 import E4M3
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.mxfp4 import GROUP_SIZE
from ....layouts.formats.mxfp8 import MXFP8, MXFP8Weight
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..fp8 import SCALE, WEIGHT, stored_float8
from ..mxfp8_tensors import stored_mxfp8
from .scheme import EIGHT_BITS, SCHEMES

GROUPS = EIGHT_BITS | {"strategy": "group", "group_size": GROUP_SIZE, "scale_dtype": "torch.uint8"}
WEIGHTS, INPUTS = GROUPS | {"dynamic": False}, GROUPS | {"dynamic": True}
OF_ZERO_POINTS = {"zp_dtype": "torch.uint8"}
"""Written because compressed-tensors' preset has it. llm-compressor leaves it out."""


class MXFP8Quantized:
    format = "mxfp8-quantized"
    reads = "MXFP8 mxfp8-quantized"
    suffix = WEIGHT
    dtypes = (E4M3,)

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        rounds = INPUTS.items() <= (group.get("input_activations") or {}).items()
        return group["format"] == self.format and rounds

    def stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        read = stored_mxfp8 if checkpoint.is_released else stored_float8
        return read(checkpoint, module)

    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, MXFP8) else f"{self.format} cannot store {spec.label}"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if not isinstance(weight, MXFP8Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec)}")
        return {module + WEIGHT: weight.codes, module + SCALE: weight.scale}

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        return WEIGHTS | OF_ZERO_POINTS

    def inputs_config(self, spec: WeightFormat) -> dict[str, Any] | None:
        return INPUTS | OF_ZERO_POINTS


SCHEMES.add(MXFP8.name, MXFP8Quantized())
