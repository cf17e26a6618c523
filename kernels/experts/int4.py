"""INT4 experts for the grouped kernel (`packed.py`): packing, reference and decoder.

Words and slices are as in `packed.py`. A row's word is laid out like this:

    bit 31                                  bit 0
     | j=3  j=2  j=1  j=0 | j=3  j=2  j=1  j=0 |    word 2t: slices 0 to 3; word 2t+1: slices 4 to 7
     |   column 2t+1      |     column 2t      |

`(word >> 4j) & 0x000F000F | 0x43004300`, one shift and one lop3, is the register with columns 2t and 2t+1 of
slice j as two bf16 numbers 128 + q (fp16: 0x6400, 1024 + q).

A word of scale_words has the scale in its high half; its low half, in the activations' type too, has

    integer zero      -(128 + z), fp16 -(1024 + z)    w = ((128 + q) - (128 + z)) * s, rounded once
    fractional zero   (8 - z) * s                     w = ((128 + q) - 136) * s + (8 - z) * s, rounded once

The formula (128 + q) * s - (128 + z) * s is not used: in bf16 it errs by a quarter of a step. The integer and
the fractional form take two packed multiply-adds for two weights.

On sm_90, with groups of 128, the loop takes per weight 2.8 instructions for blocks of 8 assignments, 3.0 for
16, 3.3 for 32, 3.5 for 64 and 4.8 for 128; groups of 32 take 0.4 to 0.8 more. Unpacking takes 1.9
instructions per weight. In groups of 128 a decode step reads 4.25 bits a weight of the chosen experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..triton_imports import tl, triton
from . import packed
from .packed import TILE_K, TILE_N, ExpertsDecoder, by_word, join_slices, part_of, slice_types, slices_of
from .routing import ExpertRouting
from .tile import Tile

MAX_GROUP = TILE_K
GROUPS = (32, 64, 128)
"""Group sizes as the kernel knows them; a multiple of 128 becomes groups of 128 that are alike."""


def kernel_group(group_size: int) -> int:
    """The group size that the kernel is compiled for.

    ValueError is raised unless the size is 32, 64 or a multiple of 128.
    """
    if group_size not in GROUPS and (group_size < MAX_GROUP or group_size % MAX_GROUP):
        raise ValueError(f"groups of {group_size}; the experts' kernel takes 32, 64 and multiples of 128")
    return min(group_size, MAX_GROUP)


def pack(
    codes: Tensor, scale: Tensor, zero: Tensor, group_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Pack a weight into `words` and `scale_words`, for activations of `dtype`.

    codes:       uint8 [E, N, K/2], low nibble is the even k
    scale, zero: [E, N, K/group]; an integer `zero` gives the integer form, a floating one the fractional
                 form. K must be a multiple of the group size.
    """
    kernel_group(group_size)
    words = torch.stack([_pack_words(of_expert) for of_expert in codes])
    return words, _pack_scales(scale, zero, group_size, words.shape[2], dtype)


def _pack_words(codes: Tensor) -> Tensor:
    """Packs one expert: uint8 [N, K/2] to int32 [N/64, K/128, 64, 16]."""
    ordered = by_word(torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1)).transpose(-1, -2)
    octets = ordered[..., ::2] | (ordered[..., 1::2] << 4)
    return octets.reshape(*ordered.shape[:4], 4).contiguous().view(torch.int32)[..., 0]


def _pack_scales(scale: Tensor, zero: Tensor, group_size: int, tiles_k: int, dtype: torch.dtype) -> Tensor:
    if group_size > MAX_GROUP:
        repeats = group_size // MAX_GROUP
        scale, zero = scale.repeat_interleave(repeats, 2), zero.repeat_interleave(repeats, 2)
    experts, n, groups = scale.shape
    high = scale.to(dtype)
    if zero.dtype.is_floating_point:
        low = ((8.0 - zero.float()) * high.float()).to(dtype)
    else:
        low = (-magic(dtype) - zero.float()).to(dtype)
    word = (high.view(torch.int16).int() << 16) | (low.view(torch.int16).int() & 0xFFFF)
    padded = tiles_k * TILE_K // kernel_group(group_size), triton.cdiv(n, TILE_N) * TILE_N
    scale_words = torch.zeros((experts, *padded), dtype=torch.int32, device=scale.device)
    scale_words[:, :groups, :n] = word.transpose(1, 2)
    return scale_words


def magic(dtype: torch.dtype) -> float:
    """Return 2 to the bits of mantissa: the last four bits of this number's mantissa hold a code."""
    return 1024.0 if dtype == torch.float16 else 128.0


def reference_weight(
    words: Tensor,
    scale_words: Tensor,
    n: int,
    group_size: int,
    fractional: bool,
    dtype: torch.dtype,
    rounded: bool = True,
) -> Tensor:
    """Return the weight [E, N, K] that the kernel multiplies by, in `dtype`, K in whole tiles; undoes `pack`.

    rounded: whether to round to `dtype`, the activations' dtype; else the result is fp32
    """
    experts, tiles_n, tiles_k = words.shape[:3]
    octets = words.contiguous().view(torch.uint8).view(experts, tiles_n, tiles_k, TILE_N, 8, 2, 2, 2)
    nibbles = torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2)
    parts = nibbles.permute(0, 1, 3, 2, 5, 7, 4, 6)
    codes = parts.reshape(experts, tiles_n * TILE_N, tiles_k * TILE_K).float()
    high, low = (
        part.to(torch.int16)
        .view(dtype)
        .float()
        .transpose(1, 2)
        .repeat_interleave(kernel_group(group_size), 2)
        for part in (scale_words >> 16, scale_words)
    )
    weight = (codes - 8.0) * high + low if fractional else (codes + (low + magic(dtype))) * high
    return (weight.to(dtype) if rounded else weight)[:, :n]


@triton.constexpr_function
def unpack_asm(group_size, fractional, half, slices):
    """Return PTX that turns two words of a row and its scale_words into the registers of the given slices."""
    kind = "f16x2" if half else "bf16x2"
    code, unit, centre = (
        ("0x64006400", "0x3C003C00", "0xE408E408") if half else ("0x43004300", "0x3F803F80", "0xC308C308")
    )
    lines = [".reg .b32 t, scale, low, one, centre, nothing;"]
    lines += [f"mov.b32 one, {unit};", f"mov.b32 centre, {centre};", "mov.b32 nothing, 0x80008000;"]
    words = len(slices)
    for at, j in enumerate(slices):
        if at == 0 or j * 16 % group_size == 0:
            scale_words = f"${words + 2 + 2 * (j * 16 // group_size)}"
            lines += [
                f"prmt.b32 low, {scale_words}, 0, 0x1010;",
                f"prmt.b32 scale, {scale_words}, 0, 0x3232;",
            ]
        source = f"${words + j // 4}"
        if j % 4:
            lines.append(f"shr.u32 t, {source}, {4 * (j % 4)};")
            source = "t"
        lines.append(f"lop3.b32 t, {source}, 0x000F000F, {code}, 0xEA;")
        lines.append(f"fma.rn.{kind} t, t, one, {'centre' if fractional else 'low'};")
        lines.append(f"fma.rn.{kind} ${at}, t, scale, {'low' if fractional else 'nothing'};")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def unpack_constraints(group_size, parts):
    return ",".join(["=&r"] * (8 // parts) + ["r"] * (2 + 2 * (128 // group_size)))


@triton.jit
def unpack_in_registers(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack a part of the tile [BN, 128] of words [BN, 16] and one to four scale_words [BN, 16]."""
    slices: tl.constexpr = slices_of(PART, PARTS)
    asm: tl.constexpr = unpack_asm(DECODER.group_size, DECODER.fractional, DECODER.half, slices)
    constraints: tl.constexpr = unpack_constraints(DECODER.group_size, PARTS)
    types: tl.constexpr = slice_types(DECODER.half, PARTS)
    inputs = (words,) + scale_words  # noqa: RUF005
    return join_slices(
        tl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=True, pack=2), BN
    )


@triton.jit
def unpack_plainly(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack as `unpack_in_registers` does, but without PTX, for the interpreter."""
    DTYPE: tl.constexpr = tl.float16 if DECODER.half else tl.bfloat16
    GROUP: tl.constexpr = DECODER.group_size
    word = tl.reshape(words, [BN, 8, 2, 1, 1])  # row, t, j / 4
    shift = tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 4)[None, :] * 4
    code = (word >> tl.reshape(shift, [1, 1, 1, 2, 4])) & 0xF  # ..., column % 2, j % 4
    code = tl.reshape(tl.permute(code, [0, 2, 4, 1, 3]), [BN, 128]).to(tl.float32)
    group = (tl.arange(0, 128) // GROUP)[None, :]
    word = tl.zeros([BN, 128], tl.int32)
    for i in tl.static_range(128 // GROUP):
        word = tl.where(group == i, tl.max(scale_words[i], axis=1)[:, None], word)
    scale = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    low = word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    if DECODER.fractional:
        weight = (code - 8.0) * scale + low
    else:
        weight = (code + (low + (1024.0 if DECODER.half else 128.0))) * scale
    return part_of(weight.to(DTYPE), BN, PART, PARTS)


@dataclass(frozen=True)
class Int4Experts(ExpertsDecoder):
    """group_size: 32, 64 or 128; fractional: whether zeros are not integers."""

    group_size: int
    fractional: bool

    name = "int4"
    unpack_in_registers = unpack_in_registers
    unpack_plainly = unpack_plainly

    @property
    def scale_rows(self) -> int:
        return TILE_K // self.group_size


def grouped_matmul(
    x: Tensor,
    words: Tensor,
    scale_words: Tensor,
    routing: ExpertRouting,
    n: int,
    group_size: int,
    fractional: bool,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return y [A, N], as `packed.grouped_matmul` does."""
    decoder = Int4Experts(x.dtype == torch.float16, kernel_group(group_size), fractional)
    return packed.grouped_matmul(x, words, scale_words, None, routing, n, decoder, bias, tile)
