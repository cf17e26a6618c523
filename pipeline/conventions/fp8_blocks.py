"""Block-scaled FP8 sources (DeepSeek, Qwen *-FP8): E4M3 weights with one fp32 scale for each block of [N, K].

They are read as ordinary tensors, dequantized one at a time; nothing serves them as FP8.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.unquantized import Unquantized
from ..checkpoints.checkpoint import Checkpoint
from .convention import CONVENTIONS, StoredWeight
from .stored import require_tensor

METHOD = "fp8"
SCALE = ".weight_scale_inv"


class FP8Blocks:
    name = "fp8-blocks"
    reads = "block-scaled FP8 sources (weight_scale_inv)"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return (checkpoint.quantization_config or {}).get("quant_method") == METHOD

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        config = checkpoint.quantization_config or {}
        block = _block(checkpoint.source, config)
        stored = {}
        for name, info in checkpoint.tensors.items():
            if info.dtype != torch.float8_e4m3fn or not name.endswith(".weight"):
                continue
            module = name.removesuffix(".weight")
            if len(info.shape) != 2:
                raise UserError(
                    f"{checkpoint.source}: {name} is FP8 with shape {list(info.shape)}, not [N, K]"
                )
            stored[module] = _stored(checkpoint, module, block)
        return stored

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        return False


def _block(source: str, config: Mapping[str, Any]) -> tuple[int, int]:
    block = config.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        raise UserError(
            f"{source}: FP8 weights with weight_block_size {block!r} are not read; it has to be [n, k]"
        )
    return block[0], block[1]


def _stored(checkpoint: Checkpoint, module: str, block: tuple[int, int]) -> StoredWeight:
    n, k = checkpoint.tensors[f"{module}.weight"].shape
    blocks = (-(-n // block[0]), -(-k // block[1]))
    scale_name = module + SCALE
    require_tensor(checkpoint, scale_name, (torch.float32, torch.bfloat16), blocks)

    def read() -> Tensor:
        scale = checkpoint.read(scale_name).float()
        spread = scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
        return (checkpoint.read(f"{module}.weight").float() * spread).to(torch.bfloat16)

    names = (f"{module}.weight", scale_name)
    described = f"FP8, blocks of {block[0]}x{block[1]}"
    return StoredWeight(module, (n, k), Unquantized(), names, read, stored_as=described)


CONVENTION = FP8Blocks()
CONVENTIONS.add(CONVENTION.name, CONVENTION)
