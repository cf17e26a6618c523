"""Weights in blocks as GGUF stores them: IQ2_XXS, 66 bytes for 256 weights, and Q8_0, 34 bytes for 32.

A block of either type has its fp16 scale first. The gguf package quantizes to Q8_0; it has no quantizer for
K-quants.
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.iq2_xxs import IQ2XXSWeight

BLOCK_BYTES, SCALE_BYTES = 66, 2
Q8_0_COLUMNS, Q8_0_BYTES = 32, 34
ROWS_AT_ONCE = 4096
"""How many rows of a matrix are in fp32 at once, which bounds the memory for quantizing an embedding."""


def to_blocks(weight: IQ2XXSWeight) -> np.ndarray:
    """Return uint8 [N, K/256 * 66]: each row is one row of the GGUF tensor."""
    _require_little_endian()
    n, super_blocks = weight.scale.shape
    scale = weight.scale.contiguous().numpy().view(np.uint8).reshape(n, super_blocks, SCALE_BYTES)
    words = weight.words.contiguous().numpy().view(np.uint8).reshape(n, super_blocks, -1)
    return np.concatenate((scale, words), axis=-1).reshape(n, -1)


def to_q8_0(weight: Tensor) -> np.ndarray:
    """Quantize float [N, K] to Q8_0 blocks, uint8 [N, K/32 * 34]."""
    _require_little_endian()
    chunks = weight.split(ROWS_AT_ONCE)
    return np.concatenate([quantize(rows.float().numpy(), GGMLQuantizationType.Q8_0) for rows in chunks])


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise UserError("GGUF blocks are little-endian; this machine is not")
