"""IQ2_XXS for the portable kernel: packing, reference and decoder; 2.5 bits a weight.

    words         int32 [N/64, K/128, 64, 8]   of a row: four words of signs, then four of indices
    scale_words   int32 [K/128 * 2, N]         a 16-bit number for each block of 32, the even one low
    factor        fp32 [1]                     the largest block scale
    table         int32 [1024 + 32]            the codebook [256, 4] of pairs in the activations' type, then
                                               for each of 16 columns its pair's offset in bytes, and 8h

Slice j of a tile is columns 16j .. 16j+15: vectors h = 0 and 1 of eight, and pairs t = 0 to 3 of each. A lane
multiplies one pair of each slice's vector (with mma.sync, two pairs in a row), so it reads only these pairs
of the codebook's entry: four or eight bytes at a time. The codebook takes 4 KB of the L1 cache.

    word t           the signs of pair t: column 2t + u of vector h of slice j has bit 15 - j - 8h + 16u
    word 4 + 2a + h  four bytes: the index of vector h of slices 4a .. 4a+3

For two or four weights: shift (the index), multiply-add (the address), load; for each two: shift and lop3
(the signs), multiply by the scale. The decoder reads the table's address from the kernel's parameter, by the
parameter's name in PTX (a test checks the name): only values from loads and constants can be decoded in the
product's own layout by Triton. The bytes for Hopper (`kernels/iq2_xxs/packing.py`) are as many, but arranged
for look-ups in shared memory, which Triton cannot express.
"""

# A kernel has no `(*several, one)`, and its tuples grow while it is compiled.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from dataclasses import dataclass

import torch
from torch import Tensor

from ..experts.packed import TILE_N, ExpertsDecoder, join_slices, slice_types, slices_of
from ..iq2_xxs.packing import all_signs
from ..triton_imports import tl, triton

ROW_WORDS = 8
SCALE_ROWS = 2
PLACES = "0x1010", "0x3232"
"""PRMT's choice of a word's low half, and of its high half, twice."""
NAME = "iq2_xxs"
TABLE = f"{NAME}_portable_kernel_param_4"
"""What PTX calls the kernel's parameter `table`."""


def pack(indices: Tensor, patterns: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return `words`, `scale_words` and `factor` of a weight, for activations of `dtype`.

    indices, patterns: [N, K/32, 4] of 0..255 and of the seven stored signs;  scales: fp32 [N, K/32]
    """
    negative = _tiled(all_signs(patterns.int()))
    signs = negative.new_zeros(*negative.shape[:3], 4, dtype=torch.int64)
    for j in range(8):
        for h in (0, 1):
            for u in (0, 1):
                pairs = negative[..., j, h, None] >> 2 * torch.arange(4, device=negative.device) + u
                signs |= (pairs & 1).long() << (15 - j - 8 * h + 16 * u)
    index = _tiled(indices.int()).unflatten(3, (2, 4)).transpose(4, 5).reshape(*negative.shape[:3], 4, 4)
    bytes_at = 8 * torch.arange(4, device=index.device)
    words = torch.cat((signs, (index.long() << bytes_at).sum(-1)), dim=-1)
    factor = scales.amax().clamp(min=1e-30).view(1)
    rows = -scales.shape[0] % TILE_N
    halves = torch.nn.functional.pad(scales / factor, (0, 0, 0, rows)).to(dtype).view(torch.int32)
    return _wrapped(words), halves.t().contiguous(), factor


def table_of(codebook: Tensor) -> Tensor:
    """Return `table` for the codebook [256, 8] of 16-bit numbers."""
    column = torch.arange(16, dtype=torch.int32, device=codebook.device)
    places = column // 2 % 4 * 4, column // 8 * 8
    return torch.cat((codebook.contiguous().view(torch.int32).flatten(), *places))


def _tiled(values: Tensor) -> Tensor:
    """Rearrange [N, K/32, 4] to [tile, tile, row, j, h], with N padded with zeros."""
    values = torch.nn.functional.pad(values.flatten(1), (0, 0, 0, -values.shape[0] % TILE_N))
    return values.unflatten(1, (-1, 8, 2)).unflatten(0, (-1, TILE_N)).transpose(1, 2)


def _wrapped(words: Tensor) -> Tensor:
    """Convert 32-bit numbers in int64 to int32."""
    return ((words + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)


@triton.constexpr_function
def unpack_asm(half, wide, slices):
    """Return PTX that turns a lane's words and two words of scales into the registers of the given slices.

    Each output and input has two or four columns, as many as a lane gets at a time.
    """
    columns = 4 if wide else 2
    pairs = columns // 2
    outs = [[f"${pairs * at + pair}" for pair in range(pairs)] for at in range(len(slices))]
    # What the columns of a vector share is taken from the first.
    inputs = [pairs * len(slices) + columns * i for i in range(7)]
    signs, low, high, offset, shift, scale_low, scale_high = inputs
    lines = [".reg .b32 s<2>, t, f, nothing;", ".reg .b64 at, table;", "mov.b32 nothing, 0x80008000;"]
    lines += [f"ld.param.u64 table, [{TABLE}];", f"cvt.u64.u32 at, ${offset};", "add.u64 table, table, at;"]
    for at, j in enumerate(slices):
        lines.append(f"bfe.u32 t, ${high if j > 3 else low}, {8 * (j % 4)}, 8;")
        lines.append("mad.wide.u32 at, t, 16, table;")
        loaded = f"{{{', '.join(outs[at])}}}" if wide else outs[at][0]
        lines.append(f"ld.global.nc{'.v2' if wide else ''}.b32 {loaded}, [at];")
    lines += [f"shl.b32 s{pair}, ${signs + 2 * pair}, ${shift};" for pair in range(pairs)]
    for at, j in enumerate(slices):
        lines.append(f"prmt.b32 f, ${scale_high if j > 3 else scale_low}, 0, {PLACES[j // 2 % 2]};")
        for pair, out in enumerate(outs[at]):
            lines.append(f"shl.b32 t, s{pair}, {j};")
            lines.append(f"lop3.b32 {out}, t, 0x80008000, {out}, 0x6A;")
            # Multiplying alone is not there for bf16 before Hopper.
            lines.append(
                f"mul.rn.f16x2 {out}, {out}, f;" if half else f"fma.rn.bf16x2 {out}, {out}, f, nothing;"
            )
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def unpack_constraints(wide, parts):
    columns = 4 if wide else 2
    return ",".join(["=&r"] * (columns // 2 * 8 // parts) + ["r"] * 7 * columns)


@triton.jit
def words_at(rows_at, table, BN: tl.constexpr):
    """Return where a row's words lie: signs, indices of slices 0 to 3, indices of slices 4 to 7; and the
    places of codes in them.
    """
    half = tl.arange(0, 2)[None, :]
    column = tl.arange(0, 16)
    offsets = tl.broadcast_to(tl.load(table + 1024 + column)[None, :], [BN, 16])
    shifts = tl.broadcast_to(tl.load(table + 1040 + column)[None, :], [BN, 16])
    signs_at = rows_at[:, None] + tl.arange(0, 4)[None, :]
    return signs_at, rows_at[:, None] + 4 + half, rows_at[:, None] + 6 + half, offsets, shifts


@triton.jit
def load_words(at, offset, table, BN: tl.constexpr, EVICT: tl.constexpr):
    """Load signs, both words of indices, and places for each column of a slice, [BN, 16] as (h, t, u); also
    return `table`.
    """
    signs = tl.load(at[0] + offset, eviction_policy=EVICT)
    low = tl.load(at[1] + offset, eviction_policy=EVICT)
    high = tl.load(at[2] + offset, eviction_policy=EVICT)
    signs = tl.reshape(tl.broadcast_to(tl.reshape(signs, [BN, 1, 4, 1]), [BN, 2, 4, 2]), [BN, 16])
    return signs, of_vectors(low, BN), of_vectors(high, BN), at[3], at[4], table


@triton.jit
def of_vectors(words, BN: tl.constexpr):
    return tl.reshape(tl.broadcast_to(words[:, :, None], [BN, 2, 8]), [BN, 16])


@triton.jit
def unpack_in_registers(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack a part of the tile [BN, 128]; words: the result of `load_words`."""
    asm: tl.constexpr = unpack_asm(DECODER.half, DECODER.wide, slices_of(PART, PARTS))
    constraints: tl.constexpr = unpack_constraints(DECODER.wide, PARTS)
    COLUMNS: tl.constexpr = 4 if DECODER.wide else 2
    types: tl.constexpr = slice_types(DECODER.half, PARTS)
    inputs = (words[0], words[1], words[2], words[3], words[4], scale_words[0], scale_words[1])
    return join_slices(
        tl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=True, pack=COLUMNS), BN
    )


@triton.jit
def widened(words, shift, HALF: tl.constexpr):
    """Return the 16-bit number that begins at a bit of each word, in fp32."""
    half = (words >> shift).to(tl.int16)
    return half.to(tl.float16 if HALF else tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def plain_slice(words, scale_words, J: tl.constexpr, HALF: tl.constexpr):
    """Return one slice [BN, 16] in fp32."""
    upper = 16 * (tl.arange(0, 16) % 2)[None, :]
    index = (words[1 + J // 4] >> (8 * (J % 4))) & 0xFF
    pair = tl.load(words[5] + index * 4 + words[3] // 4)
    number = widened(pair, upper, HALF)
    negative = (words[0] >> (15 - J - words[4] + upper)) & 1
    return tl.where(negative == 1, -number, number) * widened(scale_words[J // 4], 16 * (J // 2 % 2), HALF)


@triton.jit
def unpack_plainly(
    words, scale_words, DECODER: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Unpack as `unpack_in_registers` does, but without PTX, for the interpreter."""
    slices = ()
    for at in tl.static_range(8 // PARTS):
        slices = slices + (plain_slice(words, scale_words, PART * (8 // PARTS) + at, DECODER.half),)
    return join_slices(slices, BN).to(tl.float16 if DECODER.half else tl.bfloat16)


@dataclass(frozen=True)
class IQ2XXSExperts(ExpertsDecoder):
    """The decoder of IQ2_XXS, which has no parameters of its own. It serves only the portable product, not
    experts.

    wide: whether Triton multiplies by mma.sync, which gives a lane four columns in a row
    """

    wide: bool

    name = NAME
    unpack_in_registers = unpack_in_registers
    unpack_plainly = unpack_plainly
    words_at = words_at
    load_words = load_words

    @property
    def row_words(self) -> int:
        return ROW_WORDS

    @property
    def scale_rows(self) -> int:
        return SCALE_ROWS
