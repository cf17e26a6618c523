"""IQ2_XXS to wgmma's register operand on Hopper: the decoder of the stream-K kernel.

`packing.py` describes the bytes, `lookup.py` the look-ups. A lane decodes eight weights like this:

    lop3, or shift and lop3   the address of the codebook's entry           1.5
    lds.128                   four pairs of numbers                         1
    4 (shift, lop3)           their signs                                   7.5
    4 mul                     times one half of a register that holds the scales of rows r and r + 8

A vector's eight columns belong to one lane, while wgmma gives a lane every fourth pair: so x's pairs are
reordered in shared memory (`hopper/reorder_x.py`). There is no batch-invariant kernel for this format.
"""

from dataclasses import dataclass

from ..hopper.decoder import Decoder
from ..hopper.ptx import load_shared_v2, ptx
from ..hopper.row_pair_scales import read_scale_words, scale_block, scale_corner, scale_offset
from ..hopper.tile import HopperTile
from ..triton_imports import WHOLE_VIEWS, gl, gluon, reinterpret
from .lookup import DECLARATIONS, TABLE_BYTES, fill_table, load_lines, sign_lines

TABLE_ROWS = gl.constexpr(32 if WHOLE_VIEWS else 256)
"""Entries of the codebook in a block of it: few where all memory has to be a multiple of that."""
TABLE_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def decode_asm(first_slice, slices, half):
    """Return PTX that turns a lane's two words of a tile into the operand registers of `slices` slices.

    Operands, with row 0 for r and row 1 for r + 8; all that has four is the same in 0 and 2, and 1 and 3:
        out{slice}_row{row}_{v}   two weights
        word*4                    of blocks 0 and 1
        scale*4                   scales of both rows, of blocks 0 and 1
        copy*4                    16 times the lane's copy of the codebook
    """
    rows = (0, 1)
    operands = [f"out{i}_row{row}_{v}" for i in range(slices) for row in rows for v in (0, 1)]
    kind = "f16x2" if half else "bf16x2"
    lines = [*DECLARATIONS, ".reg .b32 f;", ".reg .b16 half0, half1;"]
    together = min(slices, 2)
    for i in range(0, slices, together):
        block, within = divmod(first_slice + i, 2)
        word = f"$word{block}"
        lines.append(f"mov.b32 {{half0, half1}}, $scale{block};")
        for row in rows:
            outs = [f"$out{i + j}_row{row}_{v}" for j in range(together) for v in (0, 1)]
            lines += load_lines(outs, word, row, "$copy0", 8 * within)
            lines.append(f"mov.b32 f, {{half{row}, half{row}}};")
            for pair, out in enumerate(outs):
                lines += sign_lines(out, word, row, 2 * within + pair)
                lines.append(f"mul.rn.{kind} {out}, {out}, f;")
    return ptx(" ".join([*operands, "word*4", "scale*4", "copy*4"]), *lines)


@gluon.constexpr_function
def decode_constraints(slices):
    return ",".join(["=&r"] * (4 * slices) + ["r"] * 12)


@gluon.constexpr_function
def slice_types(slices, dtype):
    return (dtype,) * (2 * slices)


@gluon.jit
def two_by_two(a, b):
    """Return [row / 16, r, t, v, u] that is a where u is 0 and b where u is 1, in two registers."""
    return gl.join(gl.join(a, a), gl.join(b, b))


@gluon.jit
def lane_offsets(warp, r, quad, t):
    words = (warp // 4) * (t.K_TILES * 1024) + ((warp % 4) * 32 + r * 4 + quad) * 8
    return words, scale_offset(warp, r, quad, t)


@gluon.jit
def read_words(slot, lane, TILE: gl.constexpr, t, smem):
    """Read a lane's words of both blocks of one tile, and the beginning of its copy of the codebook."""
    a, b = load_shared_v2(lane + slot * smem.WORD_BYTES, smem.WORDS + TILE * 1024)
    copy = (lane & 56) * 2
    return two_by_two(a, b), two_by_two(copy, copy)


@gluon.jit
def decode(words, scales, FIRST: gl.constexpr, SLICES: gl.constexpr, t):
    """Decode slices of a tile, as `Decoder` requires."""
    word, copy = words
    asm: gl.constexpr = decode_asm(FIRST, SLICES, t.HALF)
    constraints: gl.constexpr = decode_constraints(SLICES)
    types: gl.constexpr = slice_types(SLICES, t.DTYPE)
    inputs = (word, scales, copy)
    return gl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=False, pack=4)


@gluon.jit
def read_scales(slot, row, TILE: gl.constexpr, t, smem):
    """Read the scale words of both blocks of a tile, for rows r and r + 8."""
    a, b = read_scale_words(slot, row, TILE, t, smem)
    return two_by_two(a, b)


@gluon.jit
def fill(memory, codebook, t, smem):
    blocks: gl.constexpr = [smem.TOTAL // (TABLE_ROWS * 128), TABLE_ROWS, 32]
    table = reinterpret(memory, gl.int32, blocks, TABLE_2D)
    fill_table(table, codebook, TABLE_ROWS, t.BN // 16)


@dataclass(frozen=True)
class IQ2XXSDecoder(Decoder):
    """The decoder of IQ2_XXS; its table is the codebook, seen as int32."""

    name = "iq2_xxs"
    word_rows = 4
    table_bytes = TABLE_BYTES
    reorders_x = True
    lane_offsets = lane_offsets
    scale_corner = scale_corner
    read_words = read_words
    read_scales = read_scales
    decode = decode
    fill_table = fill

    def scale_block(self, tile: HopperTile) -> list[int]:
        return scale_block(tile.n, tile.k_tiles)
