"""Dequantizes an IQ2_XXS weight, packed as in `packing.py`, to a dense one: for products of many rows.

Plain Triton. A program makes a tile of 64 by 64; the codebook comes from L1, the signs from shifts.
"""

import torch
from torch import Tensor

from ..triton_imports import tl, triton
from .packing import TILE


@triton.jit
def _dequantize_kernel(words, scales, factor, codebook, out, N, K, HALF: tl.constexpr):
    tile_n = tl.program_id(0).to(tl.int64)
    tile = tile_n * (K // 64) + tl.program_id(1)
    row = tl.arange(0, 64)[:, None]
    column = tl.arange(0, 64)[None, :]
    warp, below, r = row // 16, row // 8 % 2, row % 8
    block, vector, weight = column // 32, column // 8 % 4, column % 8

    word = tl.load(words + tile * 256 + ((warp * 8 + r) * 4 + vector) * 2 + block)
    magnitude = tl.load(codebook + ((word >> (7 + 16 * below)) & 0xFF) * 8 + weight).to(tl.float32)
    pair = below * 4 + weight // 2
    negative = word >> (tl.where(pair == 0, 15, pair - 1) + weight % 2 * 16)

    pair_scales = tl.load(scales + tile * 64 + (warp * 8 + r) * 2 + block)
    half = (pair_scales >> (16 * below)) & 0xFFFF
    if HALF:
        scale = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = (half << 16).to(tl.float32, bitcast=True)
    value = scale * tl.load(factor) * magnitude
    value = tl.where((negative & 1) == 1, -value, value)
    rows = tile_n * 64 + row
    place = out + rows * K + tl.program_id(1) * 64 + column
    tl.store(place, value.to(out.dtype.element_ty), mask=rows < N)


def dequantize(
    words: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, n: int, dtype: torch.dtype
) -> Tensor:
    """Return the weight [n, K] in `dtype`, its scales' dtype; codebook: [256, 8] in any float dtype."""
    k = words.shape[1] * TILE
    out = torch.empty(n, k, dtype=dtype, device=words.device)
    _dequantize_kernel[words.shape[:2]](
        words, scales, factor, codebook, out, n, k, HALF=dtype == torch.float16, num_warps=4
    )
    return out
