"""INT4 to wgmma's register operand on Hopper: the decoder of the stream-K and the batch-invariant kernel.

`packing.py` describes the bytes, and has the reference:

    shift, lop3      two numbers 128 + q of a lane's word, in the register where wgmma wants them: no value
                     changes lanes
    sub 128 + z      q - z, exact;   mul: times the scale                                 (integer zero)
    sub 136          q - 8, exact;   fma: times the scale, plus (8 - z) * scale           (fractional zero)

Instructions per weight (SASS, all of the main loop) are 2.9 in chunks of 128 columns and 3.2 in chunks of 64;
at the HBM bandwidth of an H200 there is issue room for 3.7. If the kernel multiplies the sums over a group by
the scale instead (SCALE_WEIGHTS false), it needs only 2.4 instructions.
"""

from dataclasses import dataclass

from ..hopper import nibbles
from ..hopper.decoder import Decoder
from ..hopper.nibbles import words_offset, words_register_layout
from ..hopper.ptx import load_shared, load_shared_pair, ptx
from ..hopper.tile import HopperTile
from ..triton_imports import gl, gluon, reinterpret

PLAIN_3D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
MAX_SCALED_SUM_ROWS = 32


@gluon.constexpr_function
def groups_in_tile(group_size):
    return 64 // group_size if group_size < 64 else 1


@gluon.constexpr_function
def unpack_asm(first_slice, slices, decoder, scale_weights):
    """Return PTX that turns the words of two rows, r and r+8, into operand registers of `slices` slices.

    Operands, with row 0 for r and row 1 for r+8:
        out{slice}_row{row}       two weights
        word_row{row}             a word of each row
        first{group}_row{row}     128 + zero twice; with a fractional zero the scale twice
        second{group}_row{row}    the scale twice; with a fractional zero (8 - zero) * scale twice
    """
    group_size, fractional, half = decoder.group_size, decoder.fractional, decoder.half
    groups = groups_in_tile(group_size)
    rows = (0, 1)
    operands = [f"out{i}_row{row}" for i in range(slices) for row in rows]
    operands += [f"word_row{row}" for row in rows]
    for group in range(groups):
        operands += [f"{which}{group}_row{row}" for which in ("first", "second") for row in rows]
    kind = "f16x2" if half else "bf16x2"
    magic = "0x64006400" if half else "0x43004300"
    centre = "0x64086408" if half else "0x43084308"
    lines = [".reg .b32 t;", ".reg .b32 c;", f"mov.b32 c, {centre};"]
    for i in range(slices):
        j = first_slice + i
        group = (j * 16) // group_size
        for row in rows:
            out, source = f"$out{i}_row{row}", f"$word_row{row}"
            first, second = f"$first{group}_row{row}", f"$second{group}_row{row}"
            if j:
                lines.append(f"shr.u32 t, {source}, {4 * j};")
                source = "t"
            lines.append(f"lop3.b32 {out}, {source}, 0x000F000F, {magic}, 0xEA;")
            if fractional:
                lines.append(f"sub.rn.{kind} {out}, {out}, c;")
                lines.append(f"fma.rn.{kind} {out}, {out}, {first}, {second};")
            else:
                lines.append(f"sub.rn.{kind} {out}, {out}, {first};")
                if scale_weights:
                    lines.append(f"mul.rn.{kind} {out}, {out}, {second};")
    return ptx(" ".join(operands), *lines)


@gluon.constexpr_function
def unpack_constraints(slices, group_size):
    return ",".join(["=&r"] * (2 * slices) + ["r"] * (2 + 4 * groups_in_tile(group_size)))


@gluon.constexpr_function
def slice_types(slices, dtype):
    return (dtype,) * (2 * slices)


@gluon.jit
def duplicate(value, HALF: gl.constexpr):
    """Convert fp32 [BN] to int32 [BN] that holds each value twice in 16 bits."""
    if HALF:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def scale_from_word(scale_word):
    """Return the scale in a scale word with an integer zero, in fp32."""
    return (scale_word & -16).to(gl.float32, bitcast=True)


@gluon.jit
def split_scale_word(scale_word, t):
    """Unpack a scale word to the two operands `first` and `second` of `unpack_asm`."""
    if t.DECODER.fractional:
        first = (scale_word & -65536) | ((scale_word >> 16) & 0xFFFF)
        second = (scale_word << 16) | (scale_word & 0xFFFF)
    else:
        first = (scale_word & 0xF) * 0x00010001 | (0x64006400 if t.HALF else 0x43004300)
        second = duplicate(scale_from_word(scale_word), t.HALF) if t.SCALE_WEIGHTS else first
    return first, second


@gluon.jit
def decode(words, scales, FIRST: gl.constexpr, SLICES: gl.constexpr, t):
    """Decode slices of a tile, as `Decoder` requires."""
    asm: gl.constexpr = unpack_asm(FIRST, SLICES, t.DECODER, t.SCALE_WEIGHTS)
    constraints: gl.constexpr = unpack_constraints(SLICES, t.DECODER.group_size)
    types: gl.constexpr = slice_types(SLICES, t.DTYPE)
    inputs = (words,) + scales  # noqa: RUF005
    return gl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=False, pack=2)


@gluon.jit
def lane_offsets(warp, r, quad, t):
    """Return byte offsets in a stage of a lane's words of a tile, and of the scale words of its row r."""
    return words_offset(warp, r, quad, t), (warp * 16 + r) * 4 + quad * 0


@gluon.jit
def scale_corner(k_stage, tile_n, t):
    return (k_stage * (t.K_TILES * 64)) // t.DECODER.group_size, tile_n * t.BN


@gluon.jit
def read_scales(slot, row, TILE: gl.constexpr, t, smem):
    """Return, for each group of a tile, the unpacked scale words of the lane's rows r and r + 8."""
    GROUP: gl.constexpr = t.DECODER.group_size
    scales = ()
    for group in gl.static_range(groups_in_tile(GROUP)):
        a, b = load_shared_pair(
            row + slot * smem.SCALE_BYTES, smem.SCALES + (TILE * 64 // GROUP + group) * (t.BN * 4), 32
        )
        a1, a2 = split_scale_word(a, t)
        b1, b2 = split_scale_word(b, t)
        first = gl.join(gl.join(a1, a1), gl.join(b1, b1))
        second = gl.join(gl.join(a2, a2), gl.join(b2, b2))
        scales = scales + (first, second)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@gluon.jit
def read_sum_scales(slot, CHUNK: gl.constexpr, t, smem):
    """Return the scales of chunk `CHUNK`, a group of 128 columns, for its sums: [BN, 1]."""
    row = gl.arange(0, t.BN, gl.SliceLayout(1, t.MMA))
    words = load_shared(slot * smem.SCALE_BYTES + row * 4, smem.SCALES + CHUNK * t.BN * 4)
    return gl.expand_dims(scale_from_word(words), 1)


@gluon.jit
def load_scales(scale_smem, TILE: gl.constexpr, t):
    """Read scales as `read_scales` does, for the batch-invariant kernel."""
    GROUP: gl.constexpr = t.DECODER.group_size
    by_group = reinterpret(scale_smem, gl.int32, [scale_smem.shape[0], t.BN // 16, 2, 8], PLAIN_3D)
    scales = ()
    for group in gl.static_range(groups_in_tile(GROUP)):
        by_row = by_group.index((TILE * 64) // GROUP + group).permute((0, 2, 1))
        scale_words = by_row.load(gl.SliceLayout(2, gl.SliceLayout(3, words_register_layout(t.BN))))
        first, second = split_scale_word(scale_words, t)
        first = gl.expand_dims(gl.expand_dims(first, 2), 3)
        second = gl.expand_dims(gl.expand_dims(second, 2), 3)
        scales = scales + (first, second)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@dataclass(frozen=True)
class Int4Decoder(Decoder):
    """INT4 with a scale and a zero for each group of consecutive k.

    group_size  32, 64 or 128
    fractional  zeros are not integers: w = (q - 8) * scale + offset, else w = (q - zero) * scale
    planes      2 for the halves of eight-bit codes (`planes.py`)
    """

    group_size: int
    fractional: bool
    planes: int = 1

    name = "int4"
    word_rows = nibbles.WORD_ROWS
    lane_offsets = lane_offsets
    scale_corner = scale_corner
    read_words = nibbles.read_words
    read_scales = read_scales
    load_words = nibbles.load_words
    load_scales = load_scales
    decode = decode
    read_sum_scales = read_sum_scales

    @property
    def scale_columns(self) -> int:
        return max(64, self.group_size)

    def scale_block(self, tile: HopperTile) -> list[int]:
        return [max(1, tile.k_tiles * 64 // self.group_size), tile.n]

    def scales_sums(self, tile: HopperTile) -> bool:
        """With few rows of x, if a chunk is a group, the sums are scaled: a group has fewer sums than
        weights.
        """
        chunk_is_group = tile.slices == 8 and self.group_size == 128
        return tile.m <= MAX_SCALED_SUM_ROWS and chunk_is_group and not self.fractional
