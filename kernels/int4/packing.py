"""INT4 weights in the order of wgmma's register operand ("swap AB"): byte layout, packing, reference.

`decoder.py` decodes the packed bytes for `kernels/hopper/`. Activations in fp32 are not supported.

A packed weight stands for w [N, K] in groups of 32, 64 or 128 consecutive k (larger ones are repeated), as

    words        int32 [N/64, K/64, 512]  tiles of 64 rows and 64 columns, along K first; the last zero-padded
    scale_words  int32 [K/group, N]       scale and zero of a row's group in one word; N padded to 64

One tile. Warp w of four handles rows 16w .. 16w+15, and its lane 4r + t handles rows r and r+8, columns 2t,
2t+1, 2t+8 and 2t+9 of each of the four slices of 16 columns, as wgmma and mma.sync require of their first
operand. So

    word index   w . r . t . v . u         v: columns + 8    u: rows + 8
    bits         2   3   2   1   1

    row = 16 w + 8 u + r                a word: bit 31                                 bit 0
    column in the slice                   | j=3  j=2  j=1  j=0 | j=3  j=2  j=1  j=0 |  nibbles, slice j
        = 8 v + 2 t + h                   |     h = 1          |      h = 0         |

and `(word >> 4j) & 0x000F000F | 0x43004300`, one shift and one lop3, is the register that holds columns 2t
and 2t+1 of slice j as two bf16 numbers 128 + q. A lane's four words are one load of 16 bytes.

With integer zeros, a scale word is the fp32 scale with the zero in its last four bits. With fractional zeros,
it is two numbers of the activations' type: the scale in the high half, (8 - zero) * scale in the low half.
Then

    integer zero      w = (q - zero) * scale         q - zero exact, one rounding to the activations' type
    fractional zero   w = (q - 8) * scale + (8 - zero) * scale       one rounding likewise

In groups of 128 a weight takes N*K/2 + N*K/32 bytes, that is 4.25 bits per weight.
"""

import torch
from torch import Tensor

from ..triton_imports import triton

TILE = 64
MAX_GROUP = 128


def pack_words(codes: Tensor) -> Tensor:
    """Pack codes uint8 [N, K] of 0..15 into words int32 [ceil(N/64), ceil(K/64), 512]."""
    n, k = codes.shape
    tiles_n, tiles_k = triton.cdiv(n, TILE), triton.cdiv(k, TILE)
    if (n, k) != (tiles_n * TILE, tiles_k * TILE):
        codes = torch.nn.functional.pad(codes, (0, tiles_k * TILE - k, 0, tiles_n * TILE - n))
    parts = codes.view(tiles_n, 4, 2, 8, tiles_k, 4, 2, 4, 2)  # tile, w, u, r, tile, j, v, t, h
    sequential = parts.permute(0, 4, 1, 3, 7, 6, 2, 8, 5).reshape(tiles_n, tiles_k, 512, 4, 2)
    return (sequential[..., 0] | (sequential[..., 1] << 4)).view(torch.int32).view(tiles_n, tiles_k, 512)


def unpack_words(words: Tensor) -> Tensor:
    """Return the codes uint8 [N, K], with N and K rounded up to whole tiles; the inverse of `pack_words`."""
    tiles_n, tiles_k, _ = words.shape
    octets = words.contiguous().view(torch.uint8).view(tiles_n, tiles_k, 4, 8, 4, 2, 2, 2, 2)
    nibbles = torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2)  # tile, tile, w, r, t, v, u, h, j
    parts = nibbles.permute(0, 2, 6, 3, 1, 8, 5, 4, 7)
    return parts.reshape(tiles_n * TILE, tiles_k * TILE)


def pack_scales(scale: Tensor, zero: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Turn scale and zero [N, K/group] into scale words int32 [K/group, ceil(N/64) * 64]; groups of more than
    128 are repeated.

    An integer `zero` gives the integer form, a floating one the fractional form for activations of `dtype`.
    """
    if group_size > MAX_GROUP:
        repeats = group_size // MAX_GROUP
        scale, zero = scale.repeat_interleave(repeats, 1), zero.repeat_interleave(repeats, 1)
    n, groups = scale.shape
    if zero.dtype.is_floating_point:
        high = scale.to(dtype)
        low = ((8.0 - zero.float()) * scale.float()).to(dtype)
        word = (high.view(torch.int16).int() << 16) | (low.view(torch.int16).int() & 0xFFFF)
    else:
        # Round to 19 bits of mantissa: the zero takes the last four.
        word = ((scale.float().contiguous().view(torch.int32) + 8) & -16) | zero.int()
    scale_words = torch.zeros((groups, triton.cdiv(n, TILE) * TILE), dtype=torch.int32, device=scale.device)
    scale_words[:, :n] = word.t()
    return scale_words


def reference_weight(
    words: Tensor, scale_words: Tensor, group_size: int, fractional: bool, dtype: torch.dtype
) -> Tensor:
    """Return the weight that the kernels multiply by, [N, K] in `dtype`, N in whole tiles."""
    group_size = min(group_size, MAX_GROUP)
    codes = unpack_words(words).float()[:, : scale_words.shape[0] * group_size]
    if fractional:
        scale = ((scale_words >> 16) & 0xFFFF).to(torch.int16).view(dtype).float()
        offset = (scale_words & 0xFFFF).to(torch.int16).view(dtype).float()
        centred = codes - 8.0
    else:
        scale = (scale_words & -16).view(torch.float32).to(dtype).float()
        offset = torch.zeros_like(scale)
        zero = (scale_words & 0xF).t().repeat_interleave(group_size, 1)
        centred = codes - zero
    spread = [part.t().repeat_interleave(group_size, 1) for part in (scale, offset)]
    return (centred * spread[0] + spread[1]).to(dtype)


def reference_matmul(
    x: Tensor, words: Tensor, scale_words: Tensor, n: int, group_size: int, fractional: bool
) -> Tensor:
    """Compute y [M, N] = x [M, K] @ w.T in fp64, with the weight in x's type."""
    weight = reference_weight(words, scale_words, group_size, fractional, x.dtype)[:n, : x.shape[1]]
    return x.double() @ weight.double().t()
