"""Checkpoints in 4 or 8 bits that are read as sources and baselines: MXFP4, GPTQ, AWQ, bitsandbytes.

`checkpoints/` decodes these checkpoints' tensors when it opens them; this file only has the tensors' names.
A release in gpt-oss' MXFP4 is no source (`gpt_oss.py`).
"""

from functools import partial

from ...layouts.formats.unquantized import Unquantized
from ..checkpoints.checkpoint import DECODERS, Checkpoint
from ..checkpoints.decoded_tensors import DecodedTensor
from ..checkpoints.mxfp4 import METHOD as MXFP4
from .convention import CONVENTIONS, StoredWeight
from .stored import not_converted

WEIGHT = ".weight"


class DecodedSources:
    name = "decoded"
    reads = f"{', '.join(DECODERS)} sources"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        method = (checkpoint.quantization_config or {}).get("quant_method")
        return method in DECODERS and not (method == MXFP4 and checkpoint.is_released)

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        """The convention names linear layers; experts that lie in one tensor are read as that tensor."""
        return {
            name.removesuffix(WEIGHT): StoredWeight(
                name.removesuffix(WEIGHT),
                (info.shape[0], info.shape[1]),
                Unquantized(),
                (name,),
                partial(checkpoint.read, name),
                stored_as=info.stored_as,
                check=info.check,
            )
            for name, info in checkpoint.tensors.items()
            if isinstance(info, DecodedTensor) and len(info.shape) == 2 and name.endswith(WEIGHT)
        }

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        return False

    def excludes(self, checkpoint: Checkpoint, module: str) -> str | None:
        return not_converted(checkpoint, module)


CONVENTION = DecodedSources()
CONVENTIONS.add(CONVENTION.name, CONVENTION)
