"""FP8 in compressed-tensors, `float-quantized`: E4M3 weights, with inputs rounded to E4M3 while serving.

The tensors are `weight` float8_e4m3fn [N, K] and `weight_scale`, a multiplier: [N, 1] (strategy `channel`),
[1] (`tensor`) or [ceil(N/128), K/128] (`block`, with which inputs have a scale for every 128); and
`input_scale` [1], a multiplier, if the inputs' scale is static. A source in this form is dequantized to 16
bits.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ....layouts.formats.e4m3 import BLOCK, E4M3
from ....layouts.formats.fp8 import BLOCKS, DYNAMIC, FP8, ROW, STATIC, TENSOR, FP8Weight, to_blocks
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..fp8 import INPUT_SCALE, input_scale_of, stored_blocks, stored_float8, stored_rows
from .scheme import EIGHT_BITS, FP8_PER_BLOCK, FP8_PER_TOKEN, FP8_STATIC, SCHEMES, rounds_to_fp8

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
        is_row = group["weights"]["strategy"] == STRATEGIES[ROW]
        spec = FP8(ROW if is_row else TENSOR, STATIC if _is_static(group) else DYNAMIC)
        return stored_rows(checkpoint, module, spec)

    def refuses(self, spec: WeightFormat) -> str | None:
        return None if isinstance(spec, FP8) else f"{self.format} cannot store {spec.label}"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if not isinstance(weight, FP8Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec)}")
        tensors = {module + self.suffix: weight.codes, module + SCALE: _stored_scale(weight)}
        if weight.spec.is_static:
            tensors[module + INPUT_SCALE] = input_scale_of(module, inputs).reshape(1)
        return tensors

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        if not isinstance(spec, FP8):
            raise ValueError(self.refuses(spec))
        blocks = {"block_structure": [BLOCK, BLOCK]} if spec.scale == BLOCKS else {}
        return (
            EIGHT_BITS | {"strategy": STRATEGIES[spec.scale], "group_size": None, "dynamic": False} | blocks
        )

    def inputs_config(self, spec: WeightFormat) -> dict[str, Any]:
        if isinstance(spec, FP8) and spec.is_static:
            return dict(FP8_STATIC)
        return dict(FP8_PER_BLOCK if spec == FP8(BLOCKS) else FP8_PER_TOKEN)


def _is_of_rows(group: Mapping[str, Any]) -> bool:
    """Say whether each row, or the whole tensor, has a scale, and each token's input or all inputs too."""
    of_rows = group["weights"].get("strategy") in (STRATEGIES[ROW], STRATEGIES[TENSOR])
    return of_rows and (rounds_to_fp8(group) or _is_static(group))


def _is_static(group: Mapping[str, Any]) -> bool:
    """Say whether all inputs of a layer have one calibrated scale."""
    return FP8_STATIC.items() <= (group.get("input_activations") or {}).items()


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
