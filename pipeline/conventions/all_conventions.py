"""Imports every convention for its registration, and finds the one a checkpoint follows."""

from typing import TYPE_CHECKING

from ...layouts.errors import UserError
from . import compressed_tensors, fp8_blocks, modelopt, plain, torchao
from .convention import CONVENTIONS, EXPORTS, Convention

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint

__all__ = ["CONVENTIONS", "EXPORTS", "convention_of"]

READ = "; ".join(module.READS for module in (compressed_tensors, modelopt, torchao, fp8_blocks, plain))


def convention_of(checkpoint: "Checkpoint") -> Convention:
    """The convention the checkpoint declares; UserError naming what was found where it is not one we read."""
    for _, convention in CONVENTIONS.items():
        if convention.recognizes(checkpoint):
            return convention
    found = (checkpoint.quantization_config or {}).get("quant_method")
    raise UserError(
        f"{checkpoint.source}: config.json declares quant_method {found!r}, which Scalegate does not read. "
        f"It reads: {READ}."
    )
