"""INT4 to wgmma's register operand in E4M3 on Hopper: the decoder for activations in FP8 (W4A8).

`e4m3_packing.py` describes the bytes, and has the reference. A register holds four numbers, each a sign bit
and a magnitude of up to 8 in the lowest bits. Read as E4M3, these bits are a subnormal number, or 2^-6, and
equal exactly the number times 2^-9; the scale makes up for the factor. Nothing is therefore rounded before
the sums.

    lop3      the sign s of four codes          shift, lop3    their magnitudes m, less one if negative
    mad       m + s * 0x81: the sign into the highest bit of a byte, and the one

Instructions per weight (PTX): 1.1.

wgmma sums E4M3 with 14 bits. The sums over each group are therefore multiplied by the group's scale and added
to a second accumulator in fp32 (two levels, as in DeepGEMM).
"""

from dataclasses import dataclass

from ..hopper import nibbles
from ..hopper.decoder import Decoder
from ..hopper.nibbles import words_offset
from ..hopper.ptx import load_shared, ptx
from ..hopper.tile import HopperTile
from ..triton_imports import gl, gluon


@gluon.constexpr_function
def unpack_asm(slice_number):
    shift = 4 * slice_number
    signs = f"shr.u32 s, $word, {shift};" if shift else "mov.b32 s, $word;"
    return ptx(
        "numbers word",
        ".reg .b32 s, m;",
        signs, "and.b32 s, s, 0x01010101;",
        f"shr.u32 m, $word, {shift + 1};", "and.b32 m, m, 0x07070707;",
        "mad.lo.u32 $numbers, s, 0x81, m;",
    )  # fmt: skip


@gluon.jit
def decode(words, SLICE: gl.constexpr):
    """A slice of 32 columns of a tile: words [row / 16, r, t, v, u] of four numbers in E4M3."""
    asm: gl.constexpr = unpack_asm(SLICE)
    return gl.inline_asm_elementwise(asm, "=r,r", [words], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def lane_offsets(warp, r, quad, t):
    return words_offset(warp, r, quad, t), warp * 0 + r * 0 + quad * 0


@gluon.jit
def scale_corner(k_stage, tile_n, t):
    return (k_stage * (t.K_TILES * 64)) // t.DECODER.group_size, tile_n * t.BN


@gluon.jit
def read_scales(slot, row, TILE: gl.constexpr, t, smem):
    """None: scales multiply sums."""
    return row


@gluon.jit
def read_sum_scales(slot, CHUNK: gl.constexpr, t, smem):
    """Return the scales of chunk `CHUNK`, which is a group, for its sums: [BN, 1]."""
    row = gl.arange(0, t.BN, gl.SliceLayout(1, t.MMA))
    words = load_shared(slot * smem.SCALE_BYTES + row * 4, smem.SCALES + CHUNK * t.BN * 4)
    return gl.expand_dims(words.to(gl.float32, bitcast=True), 1)


@dataclass(frozen=True)
class Int4E4M3Decoder(Decoder):
    """Symmetric INT4 with a scale for each group of consecutive k, for activations in E4M3.

    group_size  32, 64 or 128; a tile's `slices` are a sixteenth of it, so that a chunk is a group
    """

    group_size: int

    name = "int4_fp8"
    word_rows = nibbles.WORD_ROWS
    x_bits = 8
    factor_by_row = True
    lane_offsets = lane_offsets
    scale_corner = scale_corner
    read_words = nibbles.read_words
    read_scales = read_scales
    decode = decode
    read_sum_scales = read_sum_scales

    @property
    def scale_columns(self) -> int:
        return max(64, self.group_size)

    def scale_block(self, tile: HopperTile) -> list[int]:
        return [tile.k_tiles * 64 // self.group_size, tile.n]

    def scales_sums(self, tile: HopperTile) -> bool:
        return True
