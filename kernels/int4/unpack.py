"""INT4 to wgmma's register operand on Hopper: what the two kernels of `hopper.py` share.

Nothing here reads or writes memory. The bytes are those of `swap_ab.py`, where the reference is:

    shift, lop3      32 numbers 128 + q of a lane's four words, where wgmma wants them: no value changes lanes
    sub 128 + z      q - z, exact;   mul: times the scale                                 (integer zero)
    sub 136          q - 8, exact;   fma: times the scale, plus (8 - z) * scale           (fractional zero)

Instructions a weight: 2.9 in chunks of 128 columns, 3.2 in chunks of 64; HBM leaves room for 3.7. Where a
kernel multiplies its sums over a group by the scale instead (`scaled` false), the mul falls away: 2.4.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def x_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def words_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


def scales_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.constexpr_function
def unpack_asm(
    first_slice: int, slices: int, group_size: int, fractional: bool, half: bool, scaled: bool
) -> str:
    """PTX that turns the words of two rows, r and r+8, into their fragment registers of a few slices.

    Operands: for each slice the registers of row r and of row r+8; the two words; then for each group of the
    tile the two rows' zeros (as 128+z twice) and their scales twice, with a fractional zero their scales and
    (8-z)*scale.
    """
    kind = "f16x2" if half else "bf16x2"
    magic = "0x64006400" if half else "0x43004300"
    centre = "0x64086408" if half else "0x43084308"
    lines = [".reg .b32 t;", ".reg .b32 c;", f"mov.b32 c, {centre};"]
    for i in range(slices):
        j = first_slice + i
        group = (j * 16) // group_size
        for row in range(2):
            out, source = f"${2 * i + row}", f"${2 * slices + row}"
            first, second = (f"${2 * slices + 2 + 4 * group + operand + row}" for operand in (0, 2))
            if j:
                lines.append(f"shr.u32 t, {source}, {4 * j};")
                source = "t"
            lines.append(f"lop3.b32 {out}, {source}, 0x000F000F, {magic}, 0xEA;")
            if fractional:
                lines.append(f"sub.rn.{kind} {out}, {out}, c;")
                lines.append(f"fma.rn.{kind} {out}, {out}, {first}, {second};")
            else:
                lines.append(f"sub.rn.{kind} {out}, {out}, {first};")
                if scaled:
                    lines.append(f"mul.rn.{kind} {out}, {out}, {second};")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def unpack_constraints(slices: int, groups: int) -> str:
    return ",".join(["=&r"] * (2 * slices) + ["r"] * (2 + 4 * groups))


@gluon.constexpr_function
def slice_types(slices: int, half: bool) -> tuple:
    return (gl.float16 if half else gl.bfloat16,) * (2 * slices)


@gluon.jit
def duplicate(value, HALF: gl.constexpr):
    """fp32 [BN] to int32 [BN] holding the value twice in 16 bits."""
    if HALF:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def scale_from_word(scale_words):
    """The scale in a word of scale_words with an integer zero, in fp32."""
    return (scale_words & -16).to(gl.float32, bitcast=True)


@gluon.jit
def zero_and_scale(scale_words, FRACTIONAL: gl.constexpr, HALF: gl.constexpr, SCALE_WEIGHTS: gl.constexpr):
    """A word of scale_words as what is subtracted and multiplied by (or multiplied by and added), each twice."""
    if FRACTIONAL:
        first = (scale_words & -65536) | ((scale_words >> 16) & 0xFFFF)
        second = (scale_words << 16) | (scale_words & 0xFFFF)
    else:
        first = (scale_words & 0xF) * 0x00010001 | (0x64006400 if HALF else 0x43004300)
        second = duplicate(scale_from_word(scale_words), HALF) if SCALE_WEIGHTS else first
    return first, second


@gluon.jit
def unpack_slices(
    words, scales, FIRST: gl.constexpr, SLICES: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr,
    HALF: gl.constexpr, SCALE_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """One, two or four slices of a tile, [row / 16, r, t, v, h, u, slice ...]: what is joined comes last."""
    asm: gl.constexpr = unpack_asm(FIRST, SLICES, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS)
    constraints: gl.constexpr = unpack_constraints(SLICES, 64 // GROUP if GROUP < 64 else 1)
    types: gl.constexpr = slice_types(SLICES, HALF)
    inputs = (words,) + scales  # noqa: RUF005
    part = gl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=False, pack=2)
    if SLICES == 1:
        slices = gl.join(part[0], part[1])
    elif SLICES == 2:
        slices = gl.join(gl.join(part[0], part[1]), gl.join(part[2], part[3]))
    else:
        even = gl.join(gl.join(part[0], part[1]), gl.join(part[4], part[5]))
        odd = gl.join(gl.join(part[2], part[3]), gl.join(part[6], part[7]))
        slices = gl.join(even, odd)
    return slices


@gluon.jit
def wgmma_operand(
    words, scales, more_words, more_scales, CHUNK: gl.constexpr, BN: gl.constexpr, SLICES: gl.constexpr,
    GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr, SCALE_WEIGHTS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """wgmma's operand [BN, 16 * SLICES] of the words of a tile; with eight slices, of two tiles."""
    operand: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    if SLICES == 8:
        low = unpack_slices(words, scales, 0, 4, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS)
        high = unpack_slices(more_words, more_scales, 0, 4, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS)
        chunk = gl.permute(gl.join(low, high), [0, 5, 1, 8, 6, 7, 3, 2, 4])
    elif SLICES == 4:
        chunk = unpack_slices(words, scales, 0, 4, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS)
        chunk = gl.permute(chunk, [0, 5, 1, 6, 7, 3, 2, 4])
    elif SLICES == 1:
        chunk = unpack_slices(words, scales, CHUNK % 4, 1, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS)
        chunk = gl.permute(chunk, [0, 5, 1, 3, 2, 4])
    else:
        chunk = unpack_slices(words, scales, (CHUNK % 2) * 2, 2, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS)
        chunk = gl.permute(chunk, [0, 5, 1, 6, 3, 2, 4])
    return gl.convert_layout(gl.reshape(chunk, [BN, 16 * SLICES]), operand, assert_trivial=True)
