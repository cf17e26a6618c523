"""Imports every convention for its registration, in the order in which they are tried; nothing else."""

from . import compressed_tensors
from .convention import CONVENTIONS, EXPORTS

__all__ = ["CONVENTIONS", "EXPORTS", "compressed_tensors"]
