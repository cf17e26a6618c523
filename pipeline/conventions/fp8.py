"""FP8 of every maker: E4M3 or E5M2 weights with one scale each, one per row, or one per block.

DeepSeek's, Qwen's, Mistral's and FBGEMM's forms are known here; compressed-tensors' and ModelOpt's forms are
known by their own conventions, which ask this file for the weights. A source is dequantized to 16 bits, one
weight at a time; an FP8 release (`Checkpoint.is_released`) is served as FP8, inputs too, if its convention
says how inputs are rounded. DeepSeek's form of FP8 can also be written. `checkpoints/float_source.py`
describes where scales lie.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.e4m3 import BLOCK, E4M3, PER_BLOCK, E4M3StaticInput
from ...layouts.formats.fp8 import BLOCKS, FP8, ROW, FP8Weight, to_blocks, to_rows
from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.unquantized import Unquantized
from ...layouts.formats.weight_format import Weight, WeightFormat
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.float_source import FLOAT8, describe_float8, names_of_float8, read_rows, refuse_unreadable
from .convention import CONVENTIONS, EXPORTS, ExportDefaults, StoredWeight
from .stored import (
    FLOAT_DTYPES,
    not_converted,
    positive_scalar,
    refuse_shape,
    require_tensor,
    scalar_shape,
)

METHOD = "fp8"
METHODS = (METHOD, "fbgemm_fp8")
PACKED_DTYPES = (torch.int8, torch.uint8)
WEIGHT, SCALE, SCALE_OF_BLOCKS, INPUT_SCALE = ".weight", ".weight_scale", ".weight_scale_inv", ".input_scale"
SECTION = {
    "quant_method": METHOD,
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""The quantization section of `config.json`, as DeepSeek writes it: every 128 inputs of a token have a
scale."""
INSTEAD = "export compressed-tensors"


class FP8Blocks(ExportDefaults):
    """FP8 of every maker is read; FP8 in blocks is also written, as DeepSeek writes it."""

    name = METHOD
    reads = "FP8 sources (weight_scale_inv, weight_scale)"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return (checkpoint.quantization_config or {}).get("quant_method") in METHODS

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        config = checkpoint.quantization_config or {}
        if not (checkpoint.is_released and SECTION.items() <= ({"fmt": "e4m3"} | config).items()):
            return float8_modules(checkpoint)
        return {
            name.removesuffix(WEIGHT): stored_blocks(checkpoint, name.removesuffix(WEIGHT), SCALE_OF_BLOCKS)
            for name, info in checkpoint.tensors.items()
            if info.dtype == E4M3 and name.endswith(WEIGHT)
        }

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        return False

    def excludes(self, checkpoint: Checkpoint, module: str) -> str | None:
        return not_converted(checkpoint, module)

    def refuses(self, spec: WeightFormat, module: str, is_embedding: bool = False) -> str | None:
        if spec != FP8(BLOCKS):
            return f"{METHOD} is written in blocks of FP8 only, not in {spec.label}; {INSTEAD}"
        return f"{METHOD} holds no embeddings; {INSTEAD}" if is_embedding else None

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        if not isinstance(weight, FP8Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec, module)}")
        return {module + WEIGHT: weight.codes, module + SCALE_OF_BLOCKS: to_blocks(weight.scale)}

    def quantization_config(
        self, specs: Mapping[str, WeightFormat], ignore: Sequence[str], embeddings: Sequence[str] = ()
    ) -> dict[str, Any]:
        return SECTION | {"modules_to_not_convert": list(ignore)}


def stored_blocks(checkpoint: Checkpoint, module: str, suffix: str) -> StoredWeight:
    """Return the released weight of `module`, whose blocks' scales are in the tensor that ends in
    `suffix`.
    """
    name, scale_name, spec = module + WEIGHT, module + suffix, FP8(BLOCKS)
    n, k = require_tensor(checkpoint, name, (E4M3,)).shape
    refuse_shape(checkpoint, name, spec, n, k)
    require_tensor(checkpoint, scale_name, FLOAT_DTYPES, (-(-n // BLOCK), k // BLOCK))

    def read() -> FP8Weight:
        return FP8Weight(spec, checkpoint.read(name), to_rows(checkpoint.read(scale_name), n))

    return StoredWeight(module, (n, k), spec, (name, scale_name), read, lambda: PER_BLOCK)


def stored_rows(checkpoint: Checkpoint, module: str, spec: FP8) -> StoredWeight:
    """Return the released weight of `module`, which has a scale for each row, [N, 1] or [N], or one scale.

    If `spec` is static, all inputs of the layer have one scale too.
    """
    name, scale_name, input_scale = module + WEIGHT, module + SCALE, module + INPUT_SCALE
    n, k = require_tensor(checkpoint, name, (E4M3,)).shape
    shape = (n, 1) if spec.scale == ROW else ()
    if tuple(require_tensor(checkpoint, scale_name, FLOAT_DTYPES).shape) != (n,) and shape:
        require_tensor(checkpoint, scale_name, FLOAT_DTYPES, shape)
    shared = () if shape else (scale_name,)
    scalars = [*shared, *([input_scale] if spec.is_static else [])]
    for scalar in scalars:
        require_tensor(checkpoint, scalar, FLOAT_DTYPES)
        scalar_shape(checkpoint, scalar)

    def read() -> FP8Weight:
        return FP8Weight(spec, checkpoint.read(name), checkpoint.read(scale_name).reshape(shape))

    def read_input() -> InputFormat:
        return spec.dynamic_input or E4M3StaticInput(positive_scalar(checkpoint, input_scale))

    names = dict.fromkeys([name, scale_name, *scalars])
    return StoredWeight(module, (n, k), spec, tuple(names), read, read_input, shared)


def input_scale_of(module: str, inputs: InputFormat | None) -> Tensor:
    """Return the fp32 scalar that is written for a layer with a calibrated scale of its inputs."""
    if not isinstance(inputs, E4M3StaticInput):
        raise ValueError(f"{module}: no calibrated scale of its inputs, but {inputs}")
    return inputs.scale.float()


def float8_modules(checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """Return every linear weight in FP8, by module. Raise UserError if a scale is absent or misshapen."""
    for name, info in checkpoint.tensors.items():
        if info.dtype in PACKED_DTYPES and name + "_scale_inv" in checkpoint.tensors:
            raise UserError(
                f"{checkpoint.source}: {name} is FP4, two codes in a byte, as DeepSeek-V4 stores experts; "
                "Scalegate reads FP8, but not FP4. Give a checkpoint in 16 bits or FP8"
            )
    return {
        name.removesuffix(WEIGHT): stored_float8(checkpoint, name.removesuffix(WEIGHT))
        for name, info in checkpoint.tensors.items()
        if info.dtype in FLOAT8 and name.endswith(WEIGHT)
    }


def stored_float8(checkpoint: Checkpoint, module: str) -> StoredWeight:
    name = module + WEIGHT
    info = checkpoint.tensors[name]
    if len(info.shape) != 2:
        raise UserError(f"{checkpoint.source}: {name} is FP8 with shape {list(info.shape)}, not [N, K]")
    refuse_unreadable(checkpoint, name)
    n, k = info.shape

    def read() -> Tensor:
        return read_rows(checkpoint, name, 0, n).to(torch.bfloat16)

    tensors = tuple(names_of_float8(checkpoint, name))
    return StoredWeight(
        module, (n, k), Unquantized(), tensors, read, stored_as=describe_float8(checkpoint, name)
    )


CONVENTION = FP8Blocks()
CONVENTIONS.add(CONVENTION.name, CONVENTION)
EXPORTS.add(CONVENTION.name, CONVENTION)
