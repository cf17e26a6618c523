"""An IQ2_XXS weight, packed as `packing.py` says, to a dense one: for products of many rows.

Plain Triton. A program makes one strip and 256 columns; the codebook comes from L1, the signs from shifts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .packing import STRIP, SUPER_BLOCK


@triton.jit
def _dequantize_kernel(words, scales, codebook, out, N, K):
    strip = tl.program_id(0).to(tl.int64)
    super_block = tl.program_id(1)
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 256)[None, :]
    weight, vector, block = column % 8, (column // 8) % 4, (column // 32) % 4
    chunk = super_block * 2 + column // 128
    chunks = K // 128

    lane_words = ((strip * chunks + chunk) * 32 + (row % 8) * 4) * 4 + (row // 8) * 2
    indices = tl.load(words + lane_words + vector * 4)
    signs = tl.load(words + lane_words + vector * 4 + 1)
    block_scale = (tl.load(words + lane_words + block * 4 + 1) >> 28) & 0xF

    magnitude = tl.load(codebook + ((indices >> block * 8) & 0xFF) * 8 + weight).to(tl.float32)
    stored = signs >> block
    shift = (weight // 2) * 4 + (weight % 2) * 16
    parity = stored & 0x01111111
    parity ^= parity >> 16
    parity ^= parity >> 8
    parity ^= parity >> 4
    negative = tl.where(weight == 7, parity, stored >> shift) & 1

    pair = tl.load(scales + (strip * (K // 256) + super_block) * 8 + row % 8)
    half = ((pair >> (row // 8) * 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    value = half * (block_scale.to(tl.float32) + 0.5) * 0.25 * magnitude
    value = tl.where(negative == 1, -value, value)
    rows = strip * 16 + row
    place = out + rows * K + super_block * 256 + column
    tl.store(place, value.to(out.dtype.element_ty), mask=rows < N)


def dequantize(words: Tensor, scales: Tensor, codebook: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """The weight [n, K] in `dtype`, computed in fp32 and rounded once. codebook: [256, 8] in any float
    dtype."""
    k = scales.shape[1] * SUPER_BLOCK
    out = torch.empty(n, k, dtype=dtype, device=words.device)
    _dequantize_kernel[(triton.cdiv(n, STRIP), k // SUPER_BLOCK)](
        words, scales, codebook, out, n, k, num_warps=4
    )
    return out
