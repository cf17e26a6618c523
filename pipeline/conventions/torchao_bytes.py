"""How torchao orders the bytes of its INT4 tiles and NVFP4 scales; arithmetic on tensors, no files.

INT4 tiles (`tile_packed_to_4d`, torch's `_convert_weight_to_int4pack`) of codes [N, K], padded to 8 and 1024:

    words int32 [N/8, K/128, 32, 4]; word [a, b, t, j] holds row n = 8a + t/4
    and, in nibble 4·odd + 2·tile + half, column k = 128b + 32j + 16·tile + 8·half + 2·(t mod 4) + odd

In this order the lanes t of a warp read the B operand of m16n8k16. Each (n, group) has a scale and a shift,
the value of code 8: w = (code - 8) * scale + shift, [K/g, N, 2] bf16.
"""

import torch
from torch import Tensor

from ...layouts.formats.int4 import Int4, Int4Weight, pack_nibbles, unpack_nibbles

N_MULTIPLE = 8
K_MULTIPLE = 1024
MIDDLE_CODE = 8
# The axes of k in a k tile of 128: word of 32, tile of 16, half of 8, lane mod 4, odd.
K_AXES = (4, 2, 2, 4, 2)
# From (n tile, n, k tile, *K_AXES) to n tile, k tile, n, lane mod 4 (these two are t), word, then the nibble.
TO_WORDS = (0, 2, 1, 6, 3, 7, 4, 5)


def pad_to_tiles(weight: Int4Weight) -> Int4Weight:
    """Return the weight padded with zero rows and columns to whole tiles; activations are padded in the same
    way.
    """
    n, k = weight.shape
    rows, columns = -n % N_MULTIPLE, -k % K_MULTIPLE
    groups = weight.spec.groups(columns)
    pad = torch.nn.functional.pad
    return Int4Weight(
        weight.spec,
        pad(weight.codes, (0, columns // 2, 0, rows)),
        pad(weight.scale, (0, groups, 0, rows)),
        pad(weight.zero_point, (0, groups, 0, rows)),
    )


def tiles_shape(n: int, k: int) -> tuple[int, ...]:
    return n // 8, k // 128, 32, 4


def pack_tiles(codes: Tensor) -> Tensor:
    """Pack codes, uint8 [N, K/2] with even k in the low nibble, into the int32 words above."""
    n, k = codes.shape[0], codes.shape[1] * 2
    ordered = unpack_nibbles(codes).view(n // 8, 8, k // 128, *K_AXES).permute(TO_WORDS)
    return pack_nibbles(ordered.reshape(-1, 8)).view(torch.int32).view(tiles_shape(n, k))


def unpack_tiles(words: Tensor) -> Tensor:
    """Unpack the int32 words to uint8 codes [N, K/2], as the inverse of `pack_tiles`."""
    n_tiles, k_tiles = words.shape[:2]
    nibbles = unpack_nibbles(words.contiguous().view(-1, 1).view(torch.uint8))
    from_words = [TO_WORDS.index(axis) for axis in range(len(TO_WORDS))]
    codes = nibbles.view(n_tiles, k_tiles, 8, 4, 4, 2, 2, 2).permute(from_words)
    return pack_nibbles(codes.reshape(n_tiles * 8, k_tiles * 128))


def from_affine(spec: Int4, codes: Tensor, scale: Tensor, shift: Tensor) -> Int4Weight:
    """Return the weight `(code - 8) * scale + shift`, with the shift as a fractional zero point."""
    scale, shift = scale.contiguous(), shift.float()
    safe = torch.where(scale == 0, 1.0, scale.float())
    return Int4Weight(spec, codes, scale, MIDDLE_CODE - shift / safe)


def swizzled_shape(n: int, k: int) -> tuple[int, int]:
    """Return the shape of NVFP4 scales of a weight [n, k], in blocks of 128 rows by 4 scales stored as 32 by
    16.
    """
    return -(-n // 128) * 32, -(-k // 64) * 16


def swizzle(scale: Tensor) -> Tensor:
    """Arrange NVFP4 scales [n, groups] in blocks, padded with zeros to whole blocks, as the inverse of
    `unswizzle`."""
    n, groups = scale.shape
    raw = torch.nn.functional.pad(scale.view(torch.uint8), (0, -groups % 4, 0, -n % 128))
    blocks = raw.view(-1, 4, 32, raw.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    shape = swizzled_shape(n, groups * 16)
    return blocks.reshape(shape).contiguous().view(torch.float8_e4m3fn)


def unswizzle(scale: Tensor, n: int, groups: int) -> Tensor:
    """Return NVFP4 scales [n, groups] from blocks. In a block, row r and column c are at [r mod 32, 4·(r/32)
    + c]."""
    row_blocks, column_blocks = -(-n // 128), -(-groups // 4)
    # As bytes: not every device permutes float8.
    blocks = scale.contiguous().view(torch.uint8).reshape(row_blocks, column_blocks, 32, 4, 4)
    rows = blocks.permute(0, 3, 2, 1, 4).reshape(row_blocks * 128, column_blocks * 4)
    return rows[:n, :groups].contiguous().view(torch.float8_e4m3fn)
