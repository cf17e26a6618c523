"""FP8 sources of every maker: E4M3 or E5M2 weights with one scale each, one per row, or one per block.

DeepSeek's, Qwen's, Mistral's and FBGEMM's are known here; compressed-tensors' and ModelOpt's by their own
conventions, which ask this file for the weights. A source is dequantized to 16 bits, one weight at a time; an
FP8 release (`Checkpoint.is_released`) is served as FP8, inputs too, if its convention says how inputs are
rounded. How scales lie is `checkpoints/float_source.py`.
"""

import torch
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.unquantized import Unquantized
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.float_source import FLOAT8, describe_float8, names_of_float8, read_rows, refuse_unreadable
from .convention import CONVENTIONS, StoredWeight
from .stored import not_converted

METHODS = ("fp8", "fbgemm_fp8")
WEIGHT = ".weight"


class FP8:
    name = "fp8"
    reads = "FP8 sources (weight_scale_inv, weight_scale)"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return (checkpoint.quantization_config or {}).get("quant_method") in METHODS

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        return float8_modules(checkpoint)

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        return False

    def excludes(self, checkpoint: Checkpoint, module: str) -> str | None:
        return not_converted(checkpoint, module)


def float8_modules(checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """Every linear weight in FP8, by module. UserError if a scale is absent or misshapen."""
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


CONVENTION = FP8()
CONVENTIONS.add(CONVENTION.name, CONVENTION)
