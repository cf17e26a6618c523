"""IQ2_XXS weights as GGUF stores them: 66 bytes for 256 weights, the fp16 scale first."""

import sys

import numpy as np

from ...base.errors import UserError
from ...layouts.formats.iq2_xxs import IQ2XXSWeight

BLOCK_BYTES, SCALE_BYTES = 66, 2


def to_blocks(weight: IQ2XXSWeight) -> np.ndarray:
    """uint8 [N, K/256 * 66], a row of the GGUF tensor each."""
    _require_little_endian()
    n, super_blocks = weight.scale.shape
    scale = weight.scale.contiguous().numpy().view(np.uint8).reshape(n, super_blocks, SCALE_BYTES)
    words = weight.words.contiguous().numpy().view(np.uint8).reshape(n, super_blocks, -1)
    return np.concatenate((scale, words), axis=-1).reshape(n, -1)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise UserError("GGUF blocks are little-endian; this machine is not")
