"""Checkpoints that are not quantized: every tensor is stored under its own name, in bf16, fp16 or fp32.

The loader reads the tensors of plain checkpoints directly. The convention is written if only keys and values
are quantized, in a format that no convention declares.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.weight_format import Weight, WeightFormat
from ..checkpoints.checkpoint import Checkpoint
from .convention import CONVENTIONS, EXPORTS, ExportDefaults, StoredWeight

NAME = "plain"


class Plain(ExportDefaults):
    name = NAME
    reads = "unquantized bf16, fp16 and fp32"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.quantization_config is None

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        return {}

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        return False

    def refuses(self, spec: WeightFormat, module: str, is_embedding: bool = False) -> str | None:
        return f"{NAME} holds no quantized weights, and this one is to be {spec.label}; leave --export out"

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        raise ValueError(self.refuses(weight.spec, module))

    def quantization_config(
        self, specs: Mapping[str, WeightFormat], ignore: Sequence[str], embeddings: Sequence[str] = ()
    ) -> dict[str, Any]:
        return {}


CONVENTION = Plain()
CONVENTIONS.add(CONVENTION.name, CONVENTION)
EXPORTS.add(CONVENTION.name, CONVENTION)
