"""How INT4 weights lie for the CPU kernel in `int4_matmul.py`, and back: the kernel's torch reference.

    codes   int32 [N'/64, K/8, 4, 16]     N' = N padded to 64 with rows of scale 0
              │        │    │  └ row of a tile: a lane of a vector
              │        │    └ tile of 16 rows: a vector of 64 bytes
              │        └ eight columns: the nibbles of a word
              └ block of 64 rows: what a thread multiplies at once

    word    bit 31 ┊  k7  k5  k3  k1 ┊  k6  k4  k2  k0 ┊ bit 0      nibble: code - 8, in two's complement

    scales  int32 [N'/64, K/g, 4, 1, 16]  scale (high half) and 8 - zero point (low half), both bfloat16
            or    [N'/64, K/g, 4, 2, 16]  the same as float32, where bfloat16 does not hold them exactly

Shifted right by 4j bits, the two halves of a word begin with columns 2j and 2j + 1: a pair of 16-bit lanes
for bfloat16's dot product.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

BLOCK, TILES, LANES, COLUMNS = 64, 4, 16, 8
MIDDLE_CODE = 8
SHIFTS = tuple(column // 2 * 4 + column % 2 * 16 for column in range(COLUMNS))
"""Of the nibble of each of a word's columns."""


class PackedInt4(NamedTuple):
    codes: Tensor
    scales: Tensor


def padded_rows(n: int) -> int:
    return -(-n // BLOCK) * BLOCK


def pack(codes: Tensor, scale: Tensor, zero_point: Tensor) -> PackedInt4:
    """Pack codes uint8 [N, K] of 0..15 with scale and zero_point [N, K/g]: w = (code - zero_point) * scale"""
    n, k = codes.shape
    padding = (0, 0, 0, padded_rows(n) - n)
    words = torch.zeros(n, k // COLUMNS, dtype=torch.int32)
    for column, shift in enumerate(SHIFTS):
        words |= (codes[:, column::COLUMNS] ^ MIDDLE_CODE).int() << shift
    of_groups = torch.stack((scale.float(), MIDDLE_CODE - zero_point.float()), -1)
    if torch.equal(of_groups.bfloat16().float(), of_groups):
        high, low = (of_groups.view(torch.int32) >> 16).unbind(-1)
        of_groups = (high << 16 | low & 0xFFFF).unsqueeze(-1)
    of_groups = functional.pad(of_groups.view(torch.int32), (0, 0, *padding))
    return PackedInt4(
        functional.pad(words, padding).unflatten(0, (-1, TILES, LANES)).permute(0, 3, 1, 2).contiguous(),
        of_groups.unflatten(0, (-1, TILES, LANES)).permute(0, 3, 1, 4, 2).contiguous(),
    )


def holds_float32(scales: Tensor) -> bool:
    return scales.shape[3] == 2


def dequantize(packed: PackedInt4, n: int) -> Tensor:
    """Return float32 [N, K], the inverse of `pack`."""
    words = packed.codes.permute(0, 2, 3, 1).flatten(0, 2)
    nibbles = torch.stack([words << 28 - shift >> 28 for shift in SHIFTS], -1).flatten(1)
    of_groups = packed.scales.permute(0, 2, 4, 1, 3).flatten(0, 2)
    if not holds_float32(packed.scales):
        of_groups = torch.cat((of_groups & -0x10000, of_groups << 16), -1)
    scale, zero = of_groups.view(torch.float32).unbind(-1)
    group = nibbles.shape[1] // scale.shape[1]
    weight = (nibbles.unflatten(1, (-1, group)) + zero.unsqueeze(-1)) * scale.unsqueeze(-1)
    return weight.flatten(1)[:n]
