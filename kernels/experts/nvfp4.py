"""NVFP4 experts for the grouped kernel (`packed.py`): packing, reference and decoder.

Words and slices are as in `packed.py`. The eight codes in a word, slice j % 4, and the recoded scales have
the places of `kernels/nvfp4/packing.py`, which also explains the arithmetic. A row of a tile has two words of
scales:

    word 0    slices 0 to 3        low half: slice 0; rotated left by 8, slice 2
    word 1    slices 4 to 7        high half: slice 1; rotated left by 8, slice 3

`factor` is 128 times an expert's global scale. Products are exact in bf16. Activations must be bf16, except
under the interpreter, which has no bf16 product. The kernel reads 4.5 bits per weight of the chosen experts.

On sm_90 the loop takes this many instructions per weight: 3.1 for blocks of 8 assignments, 3.0 for 16, 3.2
for 32, 3.5 for 64, 4.2 for 128.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..nvfp4 import packing
from ..nvfp4.instructions import code_lines, scale_lines
from ..triton_imports import tl, triton
from .packed import TILE_K, TILE_N, ExpertsDecoder, by_word, join_slices, part_of, slice_types, slices_of

SCALE_ROWS = 2
STRAY = tl.constexpr(packing.STRAY)


def pack(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Pack one expert into `words` and `scale_words`, without their first dimension.

    codes: uint8 [N, K] of 0..15
    scale: float8_e4m3fn [N, K/16]
    """
    codes, recoded = packing.recode(codes, scale)
    words = packing.words_of_codes(by_word(codes))
    tiles_n, tiles_k = words.shape[:2]
    n, groups = recoded.shape
    recoded = torch.nn.functional.pad(recoded, (0, tiles_k * 8 - groups, 0, tiles_n * TILE_N - n))
    parts = recoded.view(tiles_n * TILE_N, tiles_k * SCALE_ROWS, 2, 2)  # row, word, second, below
    return words, packing.words_of_scales(parts).t().contiguous()


def reference_weight(words: Tensor, scale_words: Tensor) -> Tensor:
    """Return an expert's numbers that the kernel multiplies by, bf16 [N, K] in whole tiles; undoes `pack`."""
    tiles_n, tiles_k = words.shape[:2]
    codes = packing.codes_of_words(words).view(
        tiles_n, tiles_k, TILE_N, 8, 2, 4, 2
    )  # ..., t, j / 4, j % 4, h
    weight = codes.permute(0, 2, 1, 4, 5, 3, 6).reshape(tiles_n * TILE_N, tiles_k * TILE_K)
    scale = packing.scales_of_words(scale_words.t().contiguous()).reshape(tiles_n * TILE_N, tiles_k * 8)
    return weight * scale.repeat_interleave(packing.GROUP, 1)


@triton.constexpr_function
def unpack_asm(slices):
    """Return PTX that turns two words of a row and its two scale words into the registers of the given
    slices.
    """
    lines = [".reg .b32 t, scales, one, nothing;", ".reg .b16 half0, half1;", "mov.b32 nothing, 0x80008000;"]
    words = len(slices)
    for at, j in enumerate(slices):
        if j % 2 == 0:
            lines += scale_lines("scales", f"${words + 2 + 2 * (j // 4)}", j % 4 // 2)
            lines.append("mov.b32 {half0, half1}, scales;")
        lines += code_lines(f"${at}", f"${words + j // 4}", j % 4)
        # Multiplying alone is not there for bf16 before Hopper.
        lines.append(f"mov.b32 one, {{half{j % 2}, half{j % 2}}};")
        lines.append(f"fma.rn.bf16x2 ${at}, ${at}, one, nothing;")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def unpack_constraints(parts):
    return ",".join(["=&r"] * (8 // parts) + ["r"] * 6)


@triton.jit
def unpack_in_registers(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack a part of the tile [BN, 128] of words [BN, 16] and two scale_words [BN, 16]."""
    asm: tl.constexpr = unpack_asm(slices_of(PART, PARTS))
    constraints: tl.constexpr = unpack_constraints(PARTS)
    types: tl.constexpr = slice_types(False, PARTS)
    inputs = (words,) + scale_words  # noqa: RUF005
    return join_slices(
        tl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=True, pack=2), BN
    )


@triton.constexpr_function
def shift_of(slice_):
    return packing.SHIFTS[slice_]


@triton.jit
def rotated(word, BY: tl.constexpr):
    word = word.to(tl.uint32, bitcast=True)
    return word if BY == 0 else (word << BY) | (word >> (32 - BY))


@triton.jit
def widen(half):
    """Return bf16 bits in the low half of a word as fp32."""
    return (half << 16).to(tl.float32, bitcast=True)


@triton.jit
def plain_slice(words, SLICE: tl.constexpr):
    """Return the codes of one slice of each word, [BN, 16, 2] in fp32."""
    turned = rotated(words, shift_of(SLICE))
    if SLICE == STRAY:
        turned = (turned & 0x81808180) | ((turned >> 8) & 0x00400040)
    return tl.join(widen(turned & 0x81C0), widen((turned >> 16) & 0x81C0))


@triton.jit
def plain_codes(words, BN: tl.constexpr):
    """Return the codes of a tile, times 2^-126, [BN, 128] in fp32."""
    even = tl.join(plain_slice(words, 0), plain_slice(words, 2))
    odd = tl.join(plain_slice(words, 1), plain_slice(words, 3))
    codes = tl.reshape(tl.join(even, odd), [BN, 8, 2, 2, 2, 2])  # row, t, j / 4, h, j / 2 % 2, j % 2
    return tl.reshape(tl.permute(codes, [0, 2, 4, 5, 1, 3]), [BN, 128])


@triton.jit
def unpack_plainly(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack as `unpack_in_registers` does, but without PTX, for the interpreter."""
    codes = plain_codes(words, BN)
    slice_ = (tl.arange(0, 128) // 16)[None, :]
    scale = tl.zeros([BN, 128], tl.float32)
    for j in tl.static_range(8):
        word = tl.max(scale_words[j // 4], axis=1)[:, None]
        half = (rotated(word, 8 * (j % 4 // 2)) >> (16 * (j % 2))) & 0x0FF0
        scale = tl.where(slice_ == j, widen(half | 0x7000), scale)
    return part_of((codes * scale).to(tl.float16 if DECODER.half else tl.bfloat16), BN, PART, PARTS)


@dataclass(frozen=True)
class NVFP4Experts(ExpertsDecoder):
    """The decoder of NVFP4, which has no parameters."""

    name = "nvfp4"
    unpack_in_registers = unpack_in_registers
    unpack_plainly = unpack_plainly

    @property
    def scale_rows(self) -> int:
        return SCALE_ROWS
