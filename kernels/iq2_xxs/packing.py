"""The bytes of an IQ2_XXS weight in the order of wgmma's register operand, and back, for our kernels.

A weight [N, K], N padded to 64, is tiles of 64 rows and 64 columns, along K first:

    words   int32 [N/64, K/64, 256]   indices and signs, 2 bits a weight
    scales  int32 [N/64, K/64, 64]    a 16-bit number for each block of 32, half a bit a weight
    factor  fp32 [1]                  the largest block scale; the kernels multiply y by it

One tile. Warp w of four takes rows 16w .. 16w+15. Its lane 4r + t takes vector t, which is eight weights, of
both blocks j of rows r and r+8. So no value changes lanes if x's columns are in the order of
`hopper/reorder_x.py`:

    word index    w . r . t . j        scale index    w . r . j
    bits          2   3   2   1        bits           2   3   1

A word is a vector of row r, "a", and the same vector of row r + 8, "b". A word has these bits from the lowest
of each half, with 0 and 1 for the weights of a pair, a and b for the signs of four pairs each:

    low half    a1 a2 a3 b0 b1 b2 b3, weight 0 of each      eight bits: index of a      a0, weight 0
    high half   a1 a2 a3 b0 b1 b2 b3, weight 1 of each      eight bits: index of b      a0, weight 1

The weights of a pair have their signs 16 bits apart, so one shift moves both to the sign bits of a pair of
bf16; an index is stored shifted by 7 bits because an entry of the codebook takes 128 bytes of shared memory.
All eight signs are stored, though the format has only seven: computing the eighth costs more than reading it.
A scale word has row r in its low half and row r + 8 in its high half. The scale is `d (0.5 + s) / 4 /
factor`, rounded to the activations' type. A weight takes 2.5 bits here; in the format itself it takes 2.0625
bits.
"""

import torch
from torch import Tensor

TILE, BLOCK, SUPER_BLOCK = 64, 32, 256
INDEX_SHIFT = 7
SIGN_BITS = (15, 0, 1, 2, 3, 4, 5, 6)
"""The bit of its half that holds a pair's sign: first the pairs of a, then the pairs of b."""


def pack_words(indices: Tensor, patterns: Tensor) -> Tensor:
    """indices, patterns: [N, K/32, 4] of 0..255 and of the seven stored sign bits."""
    index = _tiled(indices.int()).unbind(-1)
    negative = _tiled(all_signs(patterns.int())).unbind(-1)
    words = index[0] << INDEX_SHIFT | index[1] << INDEX_SHIFT + 16
    for pair, bit in enumerate(SIGN_BITS):
        signs = negative[pair // 4] >> 2 * (pair % 4)
        words |= (signs & 1) << bit | (signs >> 1 & 1) << bit + 16
    return words.flatten(2)


def all_signs(patterns: Tensor) -> Tensor:
    """Return the seven stored signs, int32, with the eighth sign as bit 7, which makes the number of minus
    signs even.
    """
    halves = patterns ^ patterns >> 4
    halves = halves ^ halves >> 2
    return patterns | (halves ^ halves >> 1) << 7 & 0x80


def pack_scales(scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Turn scales of blocks fp32 [N, K/32] into scale words, of bf16 or fp16, and the factor."""
    factor = scales.amax().clamp(min=1e-30).view(1)
    parts = _tiled((scales / factor).to(dtype).unsqueeze(-1)).squeeze(4)  # tile, tile, w, r, j, u
    return parts.contiguous().view(torch.int32).flatten(2), factor


def unpack(words: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices [N, K/32, 4], patterns of all eight signs, and scales fp32 [N, K/32] before the
    factor.
    """
    words = words.unflatten(2, (4, 8, 4, 2)).unsqueeze(-1)  # tile, tile, w, r, t, j, u
    below = torch.arange(2, device=words.device)
    indices = words >> (INDEX_SHIFT + 16 * below) & 0xFF
    patterns = torch.zeros_like(indices)
    for pair in range(4):
        bits = torch.tensor([SIGN_BITS[pair], SIGN_BITS[4 + pair]], device=words.device)
        patterns |= (words >> bits & 1) << 2 * pair | (words >> bits + 16 & 1) << 2 * pair + 1
    halves = scales.view(dtype).unflatten(2, (4, 8, 2, 2)).unsqueeze(4)
    return _rows(indices), _rows(patterns), _rows(halves).squeeze(2).float()


def _tiled(values: Tensor) -> Tensor:
    """Arrange [N, K/32, t] as [tile, tile, w, r, t, j, u], N padded with zeros."""
    rows = -values.shape[0] % TILE
    if rows:
        values = torch.cat((values, values.new_zeros(rows, *values.shape[1:])))
    parts = values.unflatten(0, (-1, 4, 2, 8)).unflatten(4, (-1, 2))  # tile, w, u, r, tile, j, t
    return parts.permute(0, 4, 1, 3, 6, 5, 2)


def _rows(parts: Tensor) -> Tensor:
    """Invert `_tiled`, except for the padding."""
    rows = parts.permute(0, 2, 6, 3, 1, 5, 4)
    return rows.reshape(rows.shape[:4].numel(), -1, rows.shape[-1])
