"""NVFP4 to wgmma's register operand on Hopper: the decoder of the stream-K and the batch-invariant kernel.

`packing.py` describes the bytes, and has the reference. Two weights, always of one row and group, take

    rotate, and   two bf16 numbers, code times 2^-126, in the register where wgmma wants them
    mul           times one half of a register that holds the scales of rows r and r + 8, times 2^119

Every product is exact. Activations must be bf16: for fp16 no arrangement of the bits needs so few
instructions.

Instructions per weight (SASS) are 1.9 for decoding, 0.25 of them for scales, and 2.8 for all of the main loop
up to 32 rows of x; at the HBM bandwidth of an H200 there is issue room for 3.9.
"""

from dataclasses import dataclass

from ..hopper import nibbles
from ..hopper.decoder import Decoder
from ..hopper.nibbles import words_offset, words_register_layout
from ..hopper.ptx import ptx
from ..hopper.row_pair_scales import read_scale_words, scale_block, scale_corner, scale_offset
from ..hopper.tile import HopperTile
from ..triton_imports import gl, gluon, reinterpret
from .instructions import code_lines, scale_lines

PLAIN_3D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.constexpr_function
def decode_asm(first_slice, slices):
    """Return PTX that turns the words of two rows, r and r+8, into operand registers of `slices` slices.

    Operands, with row 0 for r and row 1 for r+8:
        out{slice}_row{row}       two weights
        word_row{row}             a word of each row
        scale{slice}_row{row}     the scales of both rows, the same for row 0 and 1
    """
    rows = (0, 1)
    operands = [f"out{i}_row{row}" for i in range(slices) for row in rows]
    operands += [f"word_row{row}" for row in rows]
    operands += [f"scale{i}_row{row}" for i in range(slices) for row in rows]
    lines = [".reg .b32 t;", ".reg .b16 half0, half1;"]
    for i in range(slices):
        j = first_slice + i
        lines.append(f"mov.b32 {{half0, half1}}, $scale{i}_row0;")
        for row in rows:
            out, word = f"$out{i}_row{row}", f"$word_row{row}"
            lines += code_lines(out, word, j)
            lines.append(f"mov.b32 t, {{half{row}, half{row}}};")
            lines.append(f"mul.rn.bf16x2 {out}, {out}, t;")
    return ptx(" ".join(operands), *lines)


@gluon.constexpr_function
def decode_constraints(slices):
    return ",".join(["=&r"] * (2 * slices) + ["r"] * (2 + 2 * slices))


@gluon.constexpr_function
def slice_types(slices):
    return (gl.bfloat16,) * (2 * slices)


@gluon.constexpr_function
def scale_asm(second):
    """Return PTX that makes the two scales of a slice, of rows r and r+8, from a word of scales."""
    return ptx("scales word", ".reg .b32 t;", *scale_lines("$scales", "$word", second))


@gluon.jit
def slice_scales(scales, SLICE: gl.constexpr):
    """Return a slice's scales of rows r and r + 8, times 2^119, in one register."""
    asm: gl.constexpr = scale_asm(SLICE % 2)
    return gl.inline_asm_elementwise(asm, "=r,r", [scales[SLICE // 2]], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def decode(words, scales, FIRST: gl.constexpr, SLICES: gl.constexpr, t):
    """Decode slices of a tile, as `Decoder` requires."""
    inputs = (words,)
    for i in gl.static_range(SLICES):
        inputs = inputs + (slice_scales(scales, FIRST + i),)  # type: ignore[assignment]  # noqa: RUF005
    asm: gl.constexpr = decode_asm(FIRST, SLICES)
    constraints: gl.constexpr = decode_constraints(SLICES)
    types: gl.constexpr = slice_types(SLICES)
    return gl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=False, pack=2)


@gluon.jit
def lane_offsets(warp, r, quad, t):
    """Return byte offsets in a stage of a lane's words of a tile, and of its rows' two words of scales."""
    return words_offset(warp, r, quad, t), scale_offset(warp, r, quad, t)


@gluon.jit
def read_scales(slot, row, TILE: gl.constexpr, t, smem):
    """Read the two words of scales of the lane's rows, [row / 16, r, t, v, u] each: one register."""
    a, b = read_scale_words(slot, row, TILE, t, smem)
    return gl.join(gl.join(a, a), gl.join(a, a)), gl.join(gl.join(b, b), gl.join(b, b))


@gluon.jit
def load_scales(scale_smem, TILE: gl.constexpr, t):
    """Read scales as `read_scales` does, for the batch-invariant kernel; with BN=128, a stage is one tile."""
    spread: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, words_register_layout(t.BN)))
    tiles: gl.constexpr = [scale_smem.shape[0] * scale_smem.shape[1] * 64 // t.BN, t.BN // 16, 8, 2]
    both = reinterpret(scale_smem, gl.int32, tiles, PLAIN_3D).index(TILE).load(spread)
    a, b = gl.split(both)
    return spread_over_tile(a, spread), spread_over_tile(b, spread)


@gluon.jit
def spread_over_tile(word, SPREAD: gl.constexpr):
    """Reshape [row / 16, r] to [row / 16, r, 1, 1, 1], which is broadcast over t, v and u."""
    word = gl.convert_layout(word, gl.SliceLayout(2, SPREAD), assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 2), 2), 3)


@dataclass(frozen=True)
class NVFP4Decoder(Decoder):
    """The decoder of NVFP4; its global scale is in `PackedOperand.factor`."""

    name = "nvfp4"
    word_rows = nibbles.WORD_ROWS
    lane_offsets = lane_offsets
    scale_corner = scale_corner
    read_words = nibbles.read_words
    read_scales = read_scales
    load_words = nibbles.load_words
    load_scales = load_scales
    decode = decode

    def scale_block(self, tile: HopperTile) -> list[int]:
        return scale_block(tile.n, tile.k_tiles)
