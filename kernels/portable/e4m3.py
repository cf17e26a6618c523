"""E4M3 weights for the portable kernel, for activations of 16 bits: packing and decoder; 8 bits a weight.

words        int32 [N/64, K/128, 64, 32]   of a row: sixteen words of slices 0 to 3, then of slices 4 to 7
scale_words  int32 [K/128, N]              twice a 16-bit number: a scale divided by the row's `factor`, times
                                           a power of two
factor       fp32 [N]                      the largest scale of a row

Slice j of a tile is columns 16j .. 16j+15. Word 2t + i of a half has columns 2t and 2t+1 of its slices 2i
and 2i+1, and each slice has the same byte of both halves of a word:

    bits    31 .. 24          23 .. 16          15 .. 8           7 .. 0
            2t+1, odd slice   2t+1, even slice  2t, odd slice     2t, even slice

A byte's seven bits of magnitude, shifted to the end of the exponent of bf16 or fp16, are the number times
2^-120 or 2^-8, subnormal numbers too. Two weights take a shift (two for even slices), `and`, lop3 and a
multiplication by the scale word. With one scale a row, decoding is exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..experts.packed import TILE_K, TILE_N, ExpertsDecoder, join_slices, part_of, slice_types, slices_of
from ..triton_imports import tl, triton

ROW_WORDS = 32
POWERS = {torch.bfloat16: 2.0**120, torch.float16: 2.0**8}
HALF_POWER, POWER = tl.constexpr(2.0**8), tl.constexpr(2.0**120)
SMALLEST = 1e-30
"""Of a row's scale, so that rows of zeros have one."""


def pack(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return `words`, `scale_words` and `factor`, for activations of `dtype`.

    codes: float8_e4m3fn [N, K]; scale: [N, G], one or one for every 128 columns
    """
    (n, k), rows = codes.shape, -codes.shape[0] % TILE_N
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, -k % TILE_K, 0, rows))
    parts = padded.view(
        (n + rows) // TILE_N, TILE_N, -1, 2, 2, 2, 8, 2
    )  # tile, row, tile, j / 4, i, odd, t, h
    words = parts.permute(0, 2, 1, 3, 6, 4, 7, 5).reshape(*parts.shape[:3:2], TILE_N, ROW_WORDS, 4)
    factor = scale.float().amax(1).clamp(min=SMALLEST)
    ratios = (scale.float() / factor[:, None]).expand(n, words.shape[1]) * POWERS[dtype]
    halves = torch.nn.functional.pad(ratios, (0, 0, 0, rows)).to(dtype)
    scale_words = torch.stack((halves, halves), -1).view(torch.int32)[..., 0]
    return words.view(torch.int32)[..., 0], scale_words.t().contiguous(), factor


@triton.constexpr_function
def unpack_asm(half, slices):
    """Return PTX that turns the words of a row, two of slices 0 to 3 and two of slices 4 to 7, and a scale
    word into the registers of the given slices.
    """
    lines = [".reg .b32 t, s, nothing;", "mov.b32 nothing, 0x80008000;"]
    shift, mask = (1, "0x3f803f80") if half else (4, "0x07f007f0")
    count = len(slices)
    for at, j in enumerate(slices):
        word = f"${count + 2 * (j // 4) + j % 4 // 2}"
        lines.append(f"mov.b32 t, {word};" if j % 2 else f"shl.b32 t, {word}, 8;")
        lines += ["and.b32 s, t, 0x80008000;", f"shr.u32 t, t, {shift};"]
        lines.append(f"lop3.b32 t, t, {mask}, s, 0xEA;")
        # Multiplying alone is not there for bf16 before Hopper.
        lines.append(f"fma.rn.{'f16x2' if half else 'bf16x2'} ${at}, t, ${count + 4}, nothing;")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def unpack_constraints(parts):
    return ",".join(["=&r"] * (8 // parts) + ["r"] * 6)


@triton.jit
def unpack_in_registers(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack a part of the tile [BN, 128] of two words [BN, 16] and one of scale_words [BN, 16]."""
    asm: tl.constexpr = unpack_asm(DECODER.half, slices_of(PART, PARTS))
    constraints: tl.constexpr = unpack_constraints(PARTS)
    types: tl.constexpr = slice_types(DECODER.half, PARTS)
    inputs = words + scale_words
    return join_slices(
        tl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=True, pack=2), BN
    )


@triton.jit
def plain_byte(words, BYTE: tl.constexpr):
    """Return the numbers of one byte of each word, times 2^-120, in fp32."""
    bits = words.to(tl.uint32, bitcast=True) >> (8 * BYTE)
    return (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def plain_slices(words, ODD: tl.constexpr):
    """Return two columns of a slice of each word, [BN, 16, 2]."""
    return tl.join(plain_byte(words, ODD), plain_byte(words, 2 + ODD))


@triton.jit
def unpack_plainly(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack as `unpack_in_registers` does, but without PTX, for the interpreter."""
    even = tl.join(plain_slices(words[0], 0), plain_slices(words[1], 0))
    odd = tl.join(plain_slices(words[0], 1), plain_slices(words[1], 1))
    codes = tl.reshape(tl.join(even, odd), [BN, 8, 2, 2, 2, 2])  # row, t, i, h, j / 4, odd
    codes = tl.reshape(tl.permute(codes, [0, 4, 2, 5, 1, 3]), [BN, 128]) * POWER
    word = tl.max(scale_words[0] & 0xFFFF, axis=1)[:, None]
    if DECODER.half:
        tile = (codes * (word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) / HALF_POWER)).to(
            tl.float16
        )
    else:
        tile = (codes * ((word << 16).to(tl.float32, bitcast=True) / POWER)).to(tl.bfloat16)
    return part_of(tile, BN, PART, PARTS)


@triton.jit
def load_words(at, offset, table, BN: tl.constexpr, EVICT: tl.constexpr):
    """Load the words of slices 0 to 3, and of slices 4 to 7."""
    low = tl.load(at + offset, eviction_policy=EVICT)
    return low, tl.load(at + offset + 16, eviction_policy=EVICT)


@dataclass(frozen=True)
class E4M3Portable(ExpertsDecoder):
    """The decoder of E4M3, which has no parameters."""

    name = "fp8"
    unpack_in_registers = unpack_in_registers
    unpack_plainly = unpack_plainly
    load_words = load_words

    @property
    def row_words(self) -> int:
        return ROW_WORDS

    @property
    def scale_rows(self) -> int:
        return 1
