"""Imports every convention for its registration, and finds the one a checkpoint follows."""

from ...base.errors import UserError
from ..checkpoints.checkpoint import Checkpoint
from . import decoded, fp8, gpt_oss, modelopt, plain, scalegate, torchao  # noqa: F401 - registers them
from .compressed_tensors import convention as compressed_tensors  # noqa: F401 - registers it
from .convention import CONVENTIONS, EXPORTS, Convention

__all__ = ["CONVENTIONS", "EXPORTS", "convention_of"]


def convention_of(checkpoint: Checkpoint) -> Convention:
    """Return the convention that the checkpoint declares; UserError with its name if it is not one that
    Scalegate reads.
    """
    for _, convention in CONVENTIONS.items():
        if convention.recognizes(checkpoint):
            return convention
    found = (checkpoint.quantization_config or {}).get("quant_method")
    reads = "; ".join(convention.reads for _, convention in CONVENTIONS.items())
    raise UserError(
        f"{checkpoint.source}: config.json declares quant_method {found!r}, which Scalegate does not read. "
        f"It reads: {reads}."
    )
