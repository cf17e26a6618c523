"""FP8 in compressed-tensors, `float-quantized`: E4M3 weights, with inputs rounded to E4M3 while serving.

The tensors are `weight` float8_e4m3fn [N, K] and `weight_scale`, a multiplier: [N, 1] (strategy `channel`),
[1] (`tensor`) or [ceil(N/128), K/128] (`block`, with which inputs have a scale for every 128). A source in
this form is dequantized to 16 bits.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ....layouts.formats.e4m3 import BLOCK, E4M3
from ....layouts.formats.fp8 import BLOCKS, FP8, ROW, TENSOR, FP8Weight, to_blocks
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..fp8 import stored_blocks, stored_float8
from ..stored import FLOAT_DTYPES, require_tensor, scalar_shape
from .scheme import EIGHT_BITS, FP8_PER_BLOCK, FP8_PER_TOKEN, SCHEMES, rounds_to_fp8

SCALE = ".weight_scale"
STRATEGIES = {ROW: "channel", TENSOR: "tensor", BLOCKS: "block"}


class FloatQuantized:
    format = "float-quantized"
    reads = "FP8 float-quantized"
    suffix = ".weight"
    dtypes = (E4M3,)

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        weights = group.get("weights") or {}
        return (
            group["format"] == self.format
            and (weights.get("num_bits"), weights.get("type")) == (8, "float")
            and (_is_in_blocks(group) or _is_of_rows(group))
        )

    def stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        if not checkpoint.is_released:
            return stored_float8(checkpoint, module)
        if _is_in_blocks(group):
            return stored_blocks(checkpoint, module, SCALE)
        name, scale_name = module + self.suffix, module + SCALE
        n, k = require_tensor(checkpoint, name, (E4M3,)).shape
        is_row = group["weights"]["strategy"] == STRATEGIES[ROW]
        spec = FP8(ROW if is_row else TENSOR)
        require_tensor(checkpoint, scale_name, FLOAT_DTYPES, (n, 1) if is_row else None)
        if not is_row:
            scalar_shape(checkpoint, scale_name)

        def read() -> FP8Weight:
            scale = checkpoint.read(scale_name)
            return FP8Weight(spec, checkpoint.read(name), scale if is_row else scale.reshape(()))

        shared = () if is_row else (scale_name,)
        return StoredWeight(
            module, (n, k), spec, (name, scale_name), read, lambda: spec.dynamic_input, shared
        )

    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, FP8) else f"{self.format} cannot store {spec.label}"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if not isinstance(weight, FP8Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec)}")
        return {module + self.suffix: weight.codes, module + SCALE: _stored_scale(weight)}

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        if not isinstance(spec, FP8):
            raise ValueError(self.refuses(spec))
        blocks = {"block_structure": [BLOCK, BLOCK]} if spec.scale == BLOCKS else {}
        return (
            EIGHT_BITS | {"strategy": STRATEGIES[spec.scale], "group_size": None, "dynamic": False} | blocks
        )

    def inputs_config(self, spec: WeightFormat) -> dict[str, Any]:
        return dict(FP8_PER_BLOCK if spec == FP8(BLOCKS) else FP8_PER_TOKEN)


def _is_of_rows(group: Mapping[str, Any]) -> bool:
    """Say whether each row, or the whole tensor, has a scale, and each token's input too."""
    return group["weights"].get("strategy") in (STRATEGIES[ROW], STRATEGIES[TENSOR]) and rounds_to_fp8(group)


def _is_in_blocks(group: Mapping[str, Any]) -> bool:
    """Say whether each block of 128 rows and columns has a scale, and every 128 inputs of a token too."""
    weights = {"strategy": STRATEGIES[BLOCKS], "block_structure": [BLOCK, BLOCK]}
    inputs = group.get("input_activations") or {}
    return weights.items() <= group["weights"].items() and FP8_PER_BLOCK.items() <= inputs.items()


def _stored_scale(weight: FP8Weight) -> Tensor:
    if weight.spec.scale == BLOCKS:
        return to_blocks(weight.scale)
    return weight.scale.contiguous() if weight.spec.scale == ROW else weight.scale.reshape(1)


SCHEMES.add(FP8.name, FloatQuantized())
