"""INT4 for FP8 activations, in the order of wgmma's register operand: byte layout, packing, reference.

`e4m3_decoder.py` decodes the packed bytes for `kernels/hopper/`. A packed weight stands for a symmetric w [N,
K] in groups of 32, 64 or 128 consecutive k (larger ones are repeated), as

    words        int32 [N/64, K/64, 512]  tiles of 64 rows and 64 columns, along K first; the last zero-padded
    scale_words  int32 [K/group, N]       512 times a group's scale, fp32; N padded to 64

One tile. Warp w of four handles rows 16w .. 16w+15, and its lane 4r + t handles rows r and r+8, columns 4t to
4t+3 and 4t+16 to 4t+19 of both slices of 32 columns, as wgmma requires of its first operand in E4M3. So

    word index   w . r . t . v . u         v: columns + 16    u: rows + 8
    bits         2   3   2   1   1

    row = 16 w + 8 u + r                a byte: bit 7                  bit 0
    column in the slice                   | slice 1: m  s  | slice 0: m  s |
        = 16 v + 4 t + byte               |     3 bits  1  |     3 bits  1 |

A code -8 .. 7 is m if its sign s is 0, else -1 - m. In groups of 128 a weight takes 4.25 bits.
"""

import torch
from torch import Tensor

from ..triton_imports import triton
from .packing import MAX_GROUP, TILE

SCALED_BY = 512.0
"""What scales are multiplied by: the decoded number is its code times 2^-9."""


def pack_words(codes: Tensor) -> Tensor:
    """Pack codes uint8 [N, K] of 0..15 (8 is zero) into words int32 [ceil(N/64), ceil(K/64), 512]."""
    n, k = codes.shape
    tiles_n, tiles_k = triton.cdiv(n, TILE), triton.cdiv(k, TILE)
    # 8 .. 15 are 0 .. 7, and 0 .. 7 are -8 .. -1: m is 7 .. 0.
    nibbles = torch.where(codes >= 8, (codes - 8) << 1, ((7 - codes) << 1) | 1)
    if (n, k) != (tiles_n * TILE, tiles_k * TILE):
        nibbles = torch.nn.functional.pad(nibbles, (0, tiles_k * TILE - k, 0, tiles_n * TILE - n))
    parts = nibbles.view(tiles_n, 4, 2, 8, tiles_k, 2, 2, 4, 4)  # tile, w, u, r, tile, slice, v, t, byte
    sequential = parts.permute(0, 4, 1, 3, 7, 6, 2, 8, 5).reshape(tiles_n, tiles_k, 512, 4, 2)
    return (sequential[..., 0] | (sequential[..., 1] << 4)).view(torch.int32).view(tiles_n, tiles_k, 512)


def unpack_words(words: Tensor) -> Tensor:
    """Return numbers int8 [N, K] of -8 .. 7, with N and K rounded up to whole tiles; the inverse of
    `pack_words`.
    """
    tiles_n, tiles_k, _ = words.shape
    octets = words.contiguous().view(torch.uint8).view(tiles_n, tiles_k, 4, 8, 4, 2, 2, 4)
    nibbles = torch.stack((octets & 0xF, octets >> 4), dim=-1)  # tile, tile, w, r, t, v, u, byte, slice
    parts = nibbles.permute(0, 2, 6, 3, 1, 8, 5, 4, 7).reshape(tiles_n * TILE, tiles_k * TILE)
    magnitude = (parts >> 1).to(torch.int8)
    return torch.where(parts & 1 > 0, -1 - magnitude, magnitude)


def pack_scales(scale: Tensor, group_size: int) -> Tensor:
    """Turn scales [N, K/group] into scale words int32 [K/group, ceil(N/64) * 64]; repeat groups over 128."""
    if group_size > MAX_GROUP:
        scale = scale.repeat_interleave(group_size // MAX_GROUP, 1)
    n, groups = scale.shape
    words = torch.zeros((groups, triton.cdiv(n, TILE) * TILE), dtype=torch.int32, device=scale.device)
    words[:, :n] = (scale.float() * SCALED_BY).t().contiguous().view(torch.int32)
    return words


def reference_matmul(
    x: Tensor, x_scale: Tensor, words: Tensor, scale_words: Tensor, n: int, group_size: int
) -> Tensor:
    """Compute y [M, N] of E4M3 codes x [M, K] and their scales [M], in fp64."""
    scale = scale_words.view(torch.float32).double().t() / SCALED_BY
    weight = unpack_words(words).double()[:, : scale.shape[1] * group_size]
    weight = weight * scale.repeat_interleave(group_size, 1)
    return (x.double() * x_scale.double()[:, None]) @ weight[:n, : x.shape[1]].t()
