"""NVFP4 weights in the order of wgmma's register operand ("swap AB"): byte layout, packing, reference.

`decoder.py` turns the bytes into bf16 on Hopper. A packed weight stands for w [N, K], K whole groups of 16:

    words   int32 [N/64, K/64, 512]  E2M1 codes: tiles of 64 rows and 64 columns, along K first
    scales  int32 [N/64, K/64, 64]   the tiles' E4M3 scales, recoded
    factor  fp32 [1]                 128 times the global scale; the kernel multiplies y by it

One tile. Warp w of four handles rows 16w .. 16w+15, and its lane 4r + t handles rows r and r+8, columns 2t,
2t+1, 2t+8 and 2t+9 of each of the four slices j of 16 columns, which are the four groups of a row. So

    word index   w . r . t . v . u         v: columns + 8    u: rows + 8    h: the second of two columns
    bits         2   3   2   1   1

and a word holds eight codes, s e1 e0 m: for each slice j columns 8v + 2t and 8v + 2t + 1. bf16 has its sign
in bit 15, its exponent's last bits in 8 and 7 and its mantissa's first in 6: with a code's bits there the
number is the code's value times 2^-126, subnormal where that is 0.5. The bits of a word are arranged so that
one rotation and one mask bring the codes of three slices to these places; the fourth slice needs one more
`or`:

    slice   rotated left by   mask of a half
      0            2            0x81C0
      1            6            0x81C0
      2           12            0x81C0
      3            0            0x8180, and m in bit 14 of its half, moved to 6

A scale is recoded so that one mask turns it into bf16, too: a byte of five bits of exponent, + 22, and three
of mantissa, in bits 11 to 4 of a half under 0x7000 is the scale times 2^119 (2^126 of its own would not fit:
E4M3 reaches 448). Each row r of each warp has two words of scales, [w, r, 2]:

    word 0: slice 0; rotated left by 8, slice 1        low half: row r
    word 1: slice 2; rotated left by 8, slice 3        high half: row r + 8

E4M3's subnormals become normal numbers in this code. A negative scale passes its sign to the codes, and a
scale of zero makes the codes zero. The product bf16(code) * bf16(scale) is therefore exactly code * scale /
128: it needs at most six bits of mantissa. A weight takes 4.5 bits.
"""

import torch
from torch import Tensor

TILE = 64
GROUP = 16
SHIFTS = (2, 6, 12, 0)
"""For each slice, by how many bits its codes are rotated left to reach their place in bf16."""
SIGN, EXPONENT, MANTISSA = (15,), (8, 7), (6,)
CODE_BITS = (*SIGN, *EXPONENT, *MANTISSA)
"""The places of a code's bits in bf16, highest bit first."""
STRAY = 3
"""The slice whose mantissa is not at its place after the rotation."""
STRAY_SHIFT = 8
"""By how many bits that mantissa is shifted right."""
SCALE_BIT = 4
"""The bit of its half at which the byte of a scale begins."""
SCALE_SHIFT = 8
"""By how many bits the second slice's scales are rotated left."""
EXPONENT_OFFSET = 22
FACTOR = 128.0
"""The factor that the product of bf16 numbers lacks: 2^126 / 2^119."""


def bit_position(slice_: int, half: int, bit: int) -> int:
    """Return the place in a word of bits 3 .. 0 of a code."""
    target = 16 * half + CODE_BITS[3 - bit]
    if slice_ == STRAY and bit == 0:
        return target + STRAY_SHIFT
    return (target - SHIFTS[slice_]) % 32


def scale_position(second: int, below: int, bit: int) -> int:
    """Return the places that bits 7 .. 0 of a recoded scale, of row r or r + 8, have in a word of scales."""
    return (16 * below + SCALE_BIT + bit - SCALE_SHIFT * second) % 32


def pack(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Pack codes uint8 [N, K] of 0..15 and scales float8_e4m3fn [N, K/16] into words and scales."""
    n, k = codes.shape
    tiles_n, tiles_k = -(-n // TILE), -(-k // TILE)
    codes, recoded = recode(codes, scale)
    codes = torch.nn.functional.pad(codes, (0, tiles_k * TILE - k, 0, tiles_n * TILE - n))
    parts = codes.view(tiles_n, 4, 2, 8, tiles_k, 4, 2, 4, 2)  # tile, w, u, r, tile, j, v, t, h
    parts = parts.permute(0, 4, 1, 3, 7, 6, 2, 5, 8).reshape(tiles_n, tiles_k, 512, 4, 2)
    recoded = torch.nn.functional.pad(recoded, (0, tiles_k * 4 - k // GROUP, 0, tiles_n * TILE - n))
    factors = recoded.view(tiles_n, 4, 2, 8, tiles_k, 2, 2)  # tile, w, u, r, tile, word, second
    factors = factors.permute(0, 4, 1, 3, 5, 6, 2).reshape(tiles_n, tiles_k, 64, 2, 2)
    return words_of_codes(parts), words_of_scales(factors)


def recode(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes with the signs and zeros of their scales, and the scales as bytes, int32 [N, K/16]."""
    bits = scale.float().view(torch.int32)
    groups = codes.view(*scale.shape, GROUP) ^ ((bits >> 28) & 8).to(torch.uint8)[..., None]
    groups = groups.masked_fill((scale.float() == 0)[..., None], 0)
    recoded = ((bits >> 20) & 0x7FF) - ((127 - EXPONENT_OFFSET) << 3)
    return groups.view(codes.shape), recoded.clamp(min=0)


def words_of_codes(codes: Tensor) -> Tensor:
    """Pack codes uint8 [..., slice 4, half 2] into words int32 [...]."""
    words = torch.zeros(codes.shape[:-2], dtype=torch.int32, device=codes.device)
    for slice_ in range(4):
        for half in range(2):
            for bit in range(4):
                code_bits = (codes[..., slice_, half] >> bit & 1).int()
                words |= code_bits << bit_position(slice_, half, bit)
    return words


def words_of_scales(recoded: Tensor) -> Tensor:
    """Pack bytes int32 [..., second 2, below 2] into words int32 [...]."""
    words = torch.zeros(recoded.shape[:-2], dtype=torch.int32, device=recoded.device)
    for second in range(2):
        for below in range(2):
            for bit in range(8):
                words |= ((recoded[..., second, below] >> bit) & 1) << scale_position(second, below, bit)
    return words


def reference_weight(words: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that the kernel multiplies by, bf16 [N, K] in whole tiles: the weight over `FACTOR`
    and global.
    """
    tiles_n, tiles_k, _ = words.shape
    parts = codes_of_words(words).view(tiles_n, tiles_k, 4, 8, 4, 2, 2, 4, 2)  # ..., w, r, t, v, u, j, h
    weight = parts.permute(0, 2, 6, 3, 1, 7, 5, 4, 8).reshape(tiles_n * TILE, tiles_k * TILE)
    parts = scales_of_words(scales).view(tiles_n, tiles_k, 4, 8, 2, 2, 2)  # ..., w, r, word, second, u
    factor = parts.permute(0, 2, 6, 3, 1, 4, 5).reshape(tiles_n * TILE, tiles_k * 4)
    return weight * factor.repeat_interleave(GROUP, 1)


def codes_of_words(words: Tensor) -> Tensor:
    """Unpack words int32 [...] to their codes as bf16 numbers, times 2^-126, [..., slice 4, half 2]."""
    codes = torch.zeros((*words.shape, 4, 2), dtype=torch.int32, device=words.device)
    for slice_ in range(4):
        for half in range(2):
            for bit in range(4):
                code_bits = (words >> bit_position(slice_, half, bit)) & 1
                codes[..., slice_, half] |= code_bits << CODE_BITS[3 - bit]
    return codes.to(torch.int16).view(torch.bfloat16)


def scales_of_words(words: Tensor) -> Tensor:
    """Unpack words int32 [...] to their scales as bf16 numbers, times 2^119, [..., second 2, below 2]."""
    scales = torch.full((*words.shape, 2, 2), 0x7000, dtype=torch.int32, device=words.device)
    for second in range(2):
        for below in range(2):
            for bit in range(8):
                scale_bits = (words >> scale_position(second, below, bit)) & 1
                scales[..., second, below] |= scale_bits << (SCALE_BIT + bit)
    return scales.to(torch.int16).view(torch.bfloat16)
