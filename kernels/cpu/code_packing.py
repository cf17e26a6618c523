"""How quantized weights lie for the CPU kernel in `coded_matmul.py`, and back: the kernel's torch reference.

    codes   int32 [N'/64, K/C, 4, 16]     N' = N padded to 64 with rows of scale 0
              │        │    │  └ row of a tile: a lane of a vector
              │        │    └ tile of 16 rows: a vector of 64 bytes
              │        └ C columns: 8 of four bits, a word of each row; 4 of INT8
              └ block of 64 rows: what a thread multiplies at once

    word    bit 31 ┊  k7  k5  k3  k1 ┊  k6  k4  k2  k0 ┊ bit 0      of four-bit codes, see VALUES
    INT8    of each tile two vectors of 32 bytes: a byte each of k0 and k1 of all rows, then of k2 and k3

    scales  int32 [N'/64, G, 4, V, 16]    of G groups of columns, in one of the forms of `Scales`
    factor  float32 [1]                   of all weights

Shifted right by 4j bits, the two halves of a word begin with columns 2j and 2j + 1: a pair of 16-bit lanes
for bfloat16's dot product. The last group may be shorter than the others.
"""

import enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

BLOCK, TILES, LANES = 64, 4, 16


class Codes(enum.IntEnum):
    """What a code means."""

    INT4 = 0
    E2M1 = 1
    IQ2_XXS = 2
    INT8 = 3

    @property
    def columns(self) -> int:
        """Of one vector of codes."""
        return 4 if self is Codes.INT8 else 8


class Scales(enum.IntEnum):
    """How scales lie: the vectors of a group of one tile, and what each lane holds."""

    WITH_ZERO = 0
    """One vector: the scale (high half) and 8 - zero point (low half), both bfloat16."""
    WITH_FLOAT32_ZERO = 1
    """Two vectors: the same as float32, where bfloat16 does not hold them exactly."""
    FLOAT32 = 2
    """One vector, without zero points."""
    PAIRS = 3
    """One vector for two groups, without zero points: the first group's scale is the high half."""

    @property
    def vectors(self) -> int:
        return 2 if self is Scales.WITH_FLOAT32_ZERO else 1

    @property
    def has_zero(self) -> bool:
        return self in (Scales.WITH_ZERO, Scales.WITH_FLOAT32_ZERO)


MIDDLE_CODE = 8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
IQ2_XXS = (8.0, 25.0, 43.0, 0.0) * 2
VALUES = {
    Codes.INT4: tuple(float(code - 16 * (code > 7)) for code in range(16)),
    Codes.E2M1: (*E2M1, *(-value for value in E2M1)),
    Codes.IQ2_XXS: (*IQ2_XXS, *(-value for value in IQ2_XXS)),
}
"""Of each four-bit code: of INT4 the code minus 8 in two's complement, of the others bit 3 is the sign."""
SHIFTS = tuple(column // 2 * 4 + column % 2 * 16 for column in range(Codes.INT4.columns))
"""Of the nibble of each of a word's columns."""


class PackedCodes(NamedTuple):
    codes: Tensor
    scales: Tensor
    factor: Tensor


def padded_rows(n: int) -> int:
    return -(-n // BLOCK) * BLOCK


def pack_int4(codes: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[PackedCodes, Scales]:
    """Pack codes uint8 [N, K] of 0..15 with scale and zero_point [N, K/g]: w = (code - zero_point) * scale"""
    of_groups = torch.stack((scale.float(), MIDDLE_CODE - zero_point.float()), -1)
    is_bfloat16 = torch.equal(of_groups.bfloat16().float(), of_groups)
    words = _in_halves(of_groups) if is_bfloat16 else of_groups.view(torch.int32)
    packed = PackedCodes(_pack_nibbles(codes ^ MIDDLE_CODE), _pack_scales(words), torch.ones(1))
    return packed, Scales.WITH_ZERO if is_bfloat16 else Scales.WITH_FLOAT32_ZERO


def pack_e2m1(codes: Tensor, scale: Tensor, factor: Tensor) -> PackedCodes:
    """Pack codes uint8 [N, K] with scale [N, K/16], which bfloat16 holds exactly: w = e2m1(code) * scale *
    factor
    """
    pairs = functional.pad(scale.float(), (0, scale.shape[1] % 2)).unflatten(1, (-1, 2))
    return PackedCodes(_pack_nibbles(codes), _pack_scales(_in_halves(pairs)), factor.float().reshape(1))


def pack_iq2_xxs(levels: Tensor, negative: Tensor, scale: Tensor) -> PackedCodes:
    """Pack levels uint8 [N, K] of 0..2, whether they are negative, and float32 scale [N, K/32]."""
    codes = levels | negative.to(torch.uint8) << 3
    return PackedCodes(_pack_nibbles(codes), _pack_float32(scale), torch.ones(1))


def pack_int8(codes: Tensor, scale: Tensor) -> PackedCodes:
    """Pack codes int8 [N, K] with scale [N, G]: w = code * scale"""
    n, columns = codes.shape[0], Codes.INT8.columns
    padded = functional.pad(codes, (0, 0, 0, padded_rows(n) - n))
    # Rows: block, tile, lane; columns: vector, half, pair.
    vectors = padded.reshape(-1, TILES, LANES, codes.shape[1] // columns, 2, 2).permute(0, 3, 1, 4, 2, 5)
    words = vectors.flatten(3).contiguous().view(torch.int32)
    return PackedCodes(words, _pack_float32(scale), torch.ones(1))


def dequantize(packed: PackedCodes, kind: Codes, form: Scales, group_size: int, n: int) -> Tensor:
    """Return float32 [N, K], the inverse of packing."""
    words = packed.codes
    if kind is Codes.INT8:
        vectors = words.view(torch.int8).unflatten(-1, (2, LANES, 2)).permute(0, 2, 4, 1, 3, 5)
        values = vectors.flatten(3).flatten(0, 2).float()
    else:
        nibbles = torch.stack([words >> shift & 15 for shift in SHIFTS], -1)
        values = torch.tensor(VALUES[kind])[nibbles].permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 2)
    of_groups = packed.scales.permute(0, 2, 4, 1, 3).flatten(0, 2)
    if form in (Scales.WITH_ZERO, Scales.PAIRS):
        of_groups = torch.cat((of_groups & -0x10000, of_groups << 16), -1)
    numbers = of_groups.view(torch.float32)
    scale, zero = numbers.unbind(-1) if form.has_zero else (numbers.flatten(1), None)
    of_column = torch.arange(values.shape[1]) // group_size
    shifted = values if zero is None else values + zero[:, of_column]
    return (shifted * scale[:, of_column] * packed.factor)[:n]


def _pack_nibbles(codes: Tensor) -> Tensor:
    n, k = codes.shape
    words = torch.zeros(n, k // Codes.INT4.columns, dtype=torch.int32)
    for column, shift in enumerate(SHIFTS):
        words |= codes[:, column :: Codes.INT4.columns].int() << shift
    words = functional.pad(words, (0, 0, 0, padded_rows(n) - n))
    return words.unflatten(0, (-1, TILES, LANES)).permute(0, 3, 1, 2).contiguous()


def _pack_scales(words: Tensor) -> Tensor:
    """Pack int32 [N, G, V]."""
    n = words.shape[0]
    words = functional.pad(words, (0, 0, 0, 0, 0, padded_rows(n) - n))
    return words.unflatten(0, (-1, TILES, LANES)).permute(0, 3, 1, 4, 2).contiguous()


def _pack_float32(scale: Tensor) -> Tensor:
    return _pack_scales(scale.float().contiguous().view(torch.int32).unsqueeze(-1))


def _in_halves(pairs: Tensor) -> Tensor:
    """Return int32 [N, G, 1] of float32 [N, G, 2] that bfloat16 holds: the first of a pair is the high
    half.
    """
    high, low = (pairs.contiguous().view(torch.int32) >> 16).unbind(-1)
    return (high << 16 | low & 0xFFFF).unsqueeze(-1)
