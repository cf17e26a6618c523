"""gpt-oss' own form of MXFP4, `quant_method: mxfp4`: all experts of a layer in one tensor of codes and one of
scales.

    <experts>.gate_up_proj_blocks  uint8 [E, 2N, K/32, 16]  low nibble even; the rows of gate and up by turns
    <experts>.gate_up_proj_scales  uint8 [E, 2N, K/32]      E8M0
    <experts>.down_proj_blocks, _scales                     the same, of N rows
    <experts>.gate_up_proj_bias, down_proj_bias             unquantized, of all experts

Everything but the experts is unquantized. A release in this form is served as MXFP4; a source in this form is
decoded to 16 bits (`decoded.py`), as `checkpoints/mxfp4.py` describes.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.mxfp4 import GROUP_SIZE, MXFP4, NAN, MXFP4Weight
from ...layouts.formats.weight_format import Weight, WeightFormat
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.decoded_tensors import DecodedTensor
from ..checkpoints.mxfp4 import BLOCKS, BYTES, METHOD, SCALES
from .convention import CONVENTIONS, EXPORTS, ExportDefaults, StoredWeight
from .stored import not_converted

MODEL_TYPE = "gpt_oss"
GATE_UP, DOWN = "gate_up_proj", "down_proj"
PROJECTIONS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: (DOWN,)}
"""By the name of a tensor of all experts, the projections whose rows lie in it by turns."""
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
INSTEAD = "export compressed-tensors"


class GptOss(ExportDefaults):
    name = METHOD
    reads = "MXFP4 experts of gpt-oss"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        config = checkpoint.quantization_config or {}
        return config.get("quant_method") == METHOD and checkpoint.is_released

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        stored: dict[str, StoredWeight] = {}
        for info in checkpoint.tensors.values():
            experts, _, leaf = info.name.rpartition(".")
            if not isinstance(info, DecodedTensor):
                continue
            if leaf not in PROJECTIONS:
                raise UserError(
                    f"{checkpoint.source}: {info.name} is MXFP4, and no {GATE_UP} or {DOWN} of experts"
                )
            projections = PROJECTIONS[leaf]
            count, k, rows = info.shape
            for expert in range(count):
                for turn, projection in enumerate(projections):
                    module = f"{experts}.{expert}.{projection}"
                    read = partial(_read, checkpoint.source, info, expert, turn, len(projections))
                    shape = (rows // len(projections), k)
                    stored[module] = StoredWeight(module, shape, MXFP4(), (info.name,), read)
        return stored

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        return EXPERT.fullmatch(module) is not None

    def excludes(self, checkpoint: Checkpoint, module: str) -> str | None:
        return not_converted(checkpoint, module)

    def refuses(self, spec: WeightFormat, module: str, is_embedding: bool = False) -> str | None:
        if not isinstance(spec, MXFP4):
            return f"{METHOD} is written in MXFP4 only, not in {spec.label}; {INSTEAD}"
        if EXPERT.fullmatch(module) is None:
            return f"{METHOD} holds experts alone; take the recipe mxfp4-experts, or {INSTEAD}"
        return None

    def refuses_model(self, model_type: str) -> str | None:
        if model_type == MODEL_TYPE:
            return None
        return f"{METHOD} is the form of gpt-oss alone, and this model is {model_type}; {INSTEAD}"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        """Return one expert's codes [N, K/32, 16] and scales [N, K/32], for `stacked`."""
        if not isinstance(weight, MXFP4Weight):
            raise ValueError(f"{module}: {self.refuses(weight.spec, module)}")
        blocks = weight.codes.unflatten(1, (-1, BYTES))
        return {module + BLOCKS: blocks, module + SCALES: weight.scale}

    def stacked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, dict[int, list[Tensor]]] = {}
        for name, tensor in tensors.items():
            suffix = BLOCKS if name.endswith(BLOCKS) else SCALES
            matched = EXPERT.fullmatch(name.removesuffix(suffix))
            if matched is None:
                raise ValueError(f"{name} is of no expert")
            experts, expert, projection = matched.groups()
            leaf = DOWN if projection == DOWN else GATE_UP
            found.setdefault(f"{experts}.{leaf}{suffix}", {}).setdefault(int(expert), []).append(tensor)
        return {
            name: torch.stack([torch.stack(parts[expert], 1).flatten(0, 1) for expert in sorted(parts)])
            for name, parts in found.items()
        }

    def quantization_config(
        self, specs: Mapping[str, WeightFormat], ignore: Sequence[str], embeddings: Sequence[str] = ()
    ) -> dict[str, Any]:
        return {"quant_method": METHOD, "modules_to_not_convert": list(ignore)}


def _read(source: str, info: DecodedTensor, expert: int, turn: int, turns: int) -> MXFP4Weight:
    """Read every `turns`-th row of one expert, from row `turn` on."""
    blocks, scales = (part.read_rows(expert, expert + 1)[0][turn::turns] for part in info.parts)
    if bool((scales == NAN).any()):
        raise UserError(f"{source}: {info.name}{SCALES} holds NaN. Download it again, or quantize again")
    codes = blocks.flatten(1).contiguous()
    if codes.shape[1] * 2 != scales.shape[1] * GROUP_SIZE:
        raise ValueError(f"{info.name}: codes {list(codes.shape)} and scales {list(scales.shape)}")
    return MXFP4Weight(MXFP4(), codes, scales.contiguous())


CONVENTION = GptOss()
CONVENTIONS.add(CONVENTION.name, CONVENTION)
EXPORTS.add(CONVENTION.name, CONVENTION)
