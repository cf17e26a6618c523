"""IQ2_XXS weights as GGUF stores them, both ways: 66 bytes for 256 weights, the fp16 scale first."""

import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader

from ...base.errors import UserError
from ...layouts.formats.iq2_xxs import IQ2XXS, IQ2XXSWeight

BLOCK_BYTES, SCALE_BYTES = 66, 2


def to_blocks(weight: IQ2XXSWeight) -> np.ndarray:
    """uint8 [N, K/256 * 66], a row of the GGUF tensor each."""
    _require_little_endian()
    n, super_blocks = weight.scale.shape
    scale = weight.scale.contiguous().numpy().view(np.uint8).reshape(n, super_blocks, SCALE_BYTES)
    words = weight.words.contiguous().numpy().view(np.uint8).reshape(n, super_blocks, -1)
    return np.concatenate((scale, words), axis=-1).reshape(n, -1)


def from_blocks(blocks: np.ndarray) -> IQ2XXSWeight:
    """The weight of uint8 [N, K/256 * 66]; undoes `to_blocks`."""
    _require_little_endian()
    n = blocks.shape[0]
    parts = np.ascontiguousarray(blocks).reshape(n, -1, BLOCK_BYTES)
    scale = torch.from_numpy(parts[..., :SCALE_BYTES].copy().view(np.float16)[..., 0])
    words = torch.from_numpy(parts[..., SCALE_BYTES:].copy().view(np.int32).reshape(n, -1))
    return IQ2XXSWeight(IQ2XXS(), words, scale)


def read_iq2_xxs(path: Path) -> dict[str, IQ2XXSWeight]:
    """The IQ2_XXS tensors of a GGUF file by their GGUF names. UserError where it is no GGUF file."""
    try:
        tensors = GGUFReader(path).tensors
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"cannot read {path} as GGUF: {error}; download or copy it again") from error
    return {
        tensor.name: from_blocks(tensor.data)
        for tensor in tensors
        if tensor.tensor_type == GGMLQuantizationType.IQ2_XXS
    }


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise UserError("GGUF blocks are little-endian; this machine is not")
