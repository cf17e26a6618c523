"""Weights in blocks as GGUF stores them: IQ2_XXS, 66 bytes for 256 weights; Q4_0, 18 bytes for 32; and Q8_0,
34 bytes for 32.

A block of each type has its fp16 scale first. The gguf package quantizes to Q8_0; it has no quantizer for
K-quants.
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from ...base.errors import UserError
from ...layouts.formats.int4 import Int4Weight, unpack_nibbles
from ...layouts.formats.iq2_xxs import IQ2XXSWeight

BLOCK_BYTES, SCALE_BYTES = 66, 2
Q8_0_COLUMNS, Q8_0_BYTES = 32, 34
Q4_0_COLUMNS, Q4_0_BYTES = 32, 18
ROWS_AT_ONCE = 4096
"""How many rows of a matrix are in fp32 at once, which bounds the memory for quantizing an embedding."""


def to_blocks(weight: IQ2XXSWeight) -> np.ndarray:
    """Return uint8 [N, K/256 * 66]: each row is one row of the GGUF tensor."""
    _require_little_endian()
    n, super_blocks = weight.scale.shape
    scale = weight.scale.contiguous().numpy().view(np.uint8).reshape(n, super_blocks, SCALE_BYTES)
    words = weight.words.contiguous().numpy().view(np.uint8).reshape(n, super_blocks, -1)
    return np.concatenate((scale, words), axis=-1).reshape(n, -1)


def to_q4_0(weight: Int4Weight) -> np.ndarray:
    """Return symmetric INT4 in groups of 32 as uint8 [N, K/32 * 18]. The codes are kept, and scales become
    fp16; from 6e-5 on, a bf16 scale stays exact.

    Byte i of a block holds code i in its low nibble and code i + 16 in its high nibble.
    """
    _require_little_endian()
    n, k = weight.shape
    codes = unpack_nibbles(weight.codes).view(n, k // Q4_0_COLUMNS, 2, Q4_0_COLUMNS // 2)
    packed = (codes[:, :, 0] | codes[:, :, 1] << 4).numpy()
    scale = weight.scale.half().contiguous().numpy().view(np.uint8).reshape(n, -1, SCALE_BYTES)
    return np.concatenate((scale, packed), axis=-1).reshape(n, -1)


def to_q8_0(weight: Tensor) -> np.ndarray:
    """Quantize float [N, K] to Q8_0 blocks, uint8 [N, K/32 * 34]."""
    _require_little_endian()
    chunks = weight.split(ROWS_AT_ONCE)
    return np.concatenate([quantize(rows.float().numpy(), GGMLQuantizationType.Q8_0) for rows in chunks])


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise UserError("GGUF blocks are little-endian; this machine is not")
