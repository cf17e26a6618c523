"""MXFP4 for the grouped kernel (`packed.py`) and the portable one: packing, reference and decoder.

Words and slices are as in `packed.py`, and the eight codes of a word have the places of
`kernels/nvfp4/packing.py`: one rotation and one mask give two codes as bf16 numbers, times 2^-126. A row of a
tile has one word of scales: byte g is the scale of slices 2g and 2g + 1, the 32 columns of a group.

A byte is bf16's own exponent. The largest scale of a weight becomes 254, 2^127, and all others lie as far
below it as they did; `factor` is 2^(largest - 128). Products of codes and scales are therefore exact in bf16
down to 2^-130 of the largest weight. Activations must be bf16, except under the interpreter, which has no
bf16 product. The kernel reads 4.25 bits per weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..nvfp4 import packing
from ..nvfp4.instructions import code_lines
from ..triton_imports import tl, triton
from .nvfp4 import plain_codes, widen
from .packed import TILE_K, TILE_N, ExpertsDecoder, by_word, join_slices, part_of, slice_types, slices_of

GROUP = 32
LARGEST = 254
"""What the byte of the largest scale becomes: 2^127, bf16's largest power of two."""
FACTOR_BIAS = 128
"""2^127 times 2^-126, and E8M0's bias of 127."""
MANTISSA_BITS = tl.constexpr(7)


def pack(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a weight into `words`, `scale_words` and `factor`, without their first dimension.

    codes: uint8 [N, K] of 0..15
    scale: uint8 [N, K/32], E8M0
    """
    words = packing.words_of_codes(by_word(codes))
    tiles_n, tiles_k = words.shape[:2]
    n, groups = scale.shape
    largest = scale.max().int()
    exponents = (scale.int() - largest + LARGEST).clamp(min=0)
    padded = torch.nn.functional.pad(
        exponents, (0, tiles_k * TILE_K // GROUP - groups, 0, tiles_n * TILE_N - n)
    )
    parts = padded.to(torch.uint8).view(tiles_n * TILE_N, tiles_k, TILE_K // GROUP)
    factor = torch.ldexp(torch.ones((), device=scale.device), largest - FACTOR_BIAS)
    return words, parts.view(torch.int32).squeeze(-1).t().contiguous(), factor


def reference_weight(words: Tensor, scale_words: Tensor) -> Tensor:
    """Return the numbers that the kernel multiplies by, bf16 [N, K] in whole tiles; undoes `pack`."""
    tiles_n, tiles_k = words.shape[:2]
    codes = packing.codes_of_words(words).view(
        tiles_n, tiles_k, TILE_N, 8, 2, 4, 2
    )  # ..., t, j / 4, j % 4, h
    weight = codes.permute(0, 2, 1, 4, 5, 3, 6).reshape(tiles_n * TILE_N, tiles_k * TILE_K)
    exponents = scale_words.t().contiguous().view(torch.uint8).to(torch.int16)
    return weight * (exponents << 7).view(torch.bfloat16).repeat_interleave(GROUP, 1)


@triton.constexpr_function
def unpack_asm(slices):
    """Return PTX that turns two words of a row and its word of scales into the registers of the given
    slices.
    """
    lines = [".reg .b32 t, scales, nothing;", "mov.b32 nothing, 0x80008000;"]
    words = len(slices)
    for at, j in enumerate(slices):
        if j % 2 == 0:
            # The group's byte in the high byte of both halves, then one bit lower: bf16's exponent.
            lines.append(f"prmt.b32 scales, ${words + 2}, 0, 0x{j // 2}4{j // 2}4;")
            lines.append("shr.u32 scales, scales, 1;")
        lines += code_lines(f"${at}", f"${words + j // 4}", j % 4)
        # Multiplying alone is not there for bf16 before Hopper.
        lines.append(f"fma.rn.bf16x2 ${at}, ${at}, scales, nothing;")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def unpack_constraints(parts):
    return ",".join(["=&r"] * (8 // parts) + ["r"] * 4)


@triton.jit
def unpack_in_registers(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack a part of the tile [BN, 128] of words [BN, 16] and one scale_words [BN, 16]."""
    asm: tl.constexpr = unpack_asm(slices_of(PART, PARTS))
    constraints: tl.constexpr = unpack_constraints(PARTS)
    types: tl.constexpr = slice_types(False, PARTS)
    inputs = (words,) + scale_words  # noqa: RUF005
    return join_slices(
        tl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=True, pack=2), BN
    )


@triton.jit
def unpack_plainly(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack as `unpack_in_registers` does, but without PTX, for the interpreter."""
    codes = plain_codes(words, BN)
    group = (tl.arange(0, 128) // 32)[None, :]
    word = tl.max(scale_words[0], axis=1)[:, None].to(tl.uint32, bitcast=True)
    exponent = (word >> (8 * group).to(tl.uint32)) & 0xFF
    scale = widen(exponent << MANTISSA_BITS)
    return part_of((codes * scale).to(tl.float16 if DECODER.half else tl.bfloat16), BN, PART, PARTS)


@dataclass(frozen=True)
class MXFP4Experts(ExpertsDecoder):
    """The decoder of MXFP4, which has no parameters."""

    name = "mxfp4"
    unpack_in_registers = unpack_in_registers
    unpack_plainly = unpack_plainly

    @property
    def scale_rows(self) -> int:
        return 1
