"""Checkpoints that are not quantized: every tensor is what its name says, in bf16, fp16 or fp32.

It quantizes and writes nothing; the loader reads such tensors directly.
"""

from ..checkpoints.checkpoint import Checkpoint
from .convention import CONVENTIONS, StoredWeight


class Plain:
    name = "plain"
    reads = "unquantized bf16, fp16 and fp32"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.quantization_config is None

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        return {}

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        return False


CONVENTION = Plain()
CONVENTIONS.add(CONVENTION.name, CONVENTION)
