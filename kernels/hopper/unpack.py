"""INT4 to wgmma's register operand on Hopper, for the stream-K and the batch-invariant kernel.

Nothing here reads or writes memory. The bytes are those of `swap_ab.py`, where the reference is:

    shift, lop3      two numbers 128 + q of a lane's word, in the register where wgmma wants them: no value
                     changes lanes
    sub 128 + z      q - z, exact;   mul: times the scale                                 (integer zero)
    sub 136          q - 8, exact;   fma: times the scale, plus (8 - z) * scale           (fractional zero)

Instructions a weight (SASS, all of the main loop): 2.9 in chunks of 128 columns, 3.2 in chunks of 64; at the
HBM bandwidth of an H200 there is issue room for 3.7. Where a kernel multiplies its sums over a group by the
scale instead (SCALE_WEIGHTS false), the mul falls away: 2.4.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .ptx import ptx


def x_layout() -> gl.NVMMASharedLayout:
    """Shared memory of a stage of x."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def words_layout() -> gl.NVMMASharedLayout:
    """Shared memory of a stage of words."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


def scale_words_layout() -> gl.NVMMASharedLayout:
    """Shared memory of a stage of scale words."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.constexpr_function
def unpack_asm(first_slice, slices, group_size, fractional, half, scale_weights):
    """PTX that turns the words of two rows, r and r+8, into their operand registers of `slices` slices.

    Operands, with row 0 for r and row 1 for r+8:
        out{slice}_row{row}       two weights
        word_row{row}             a word of each row
        first{group}_row{row}     128 + zero twice; with a fractional zero the scale twice
        second{group}_row{row}    the scale twice; with a fractional zero (8 - zero) * scale twice
    """
    groups = 64 // group_size if group_size < 64 else 1
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
def unpack_constraints(slices, groups):
    return ",".join(["=&r"] * (2 * slices) + ["r"] * (2 + 4 * groups))


@gluon.constexpr_function
def slice_types(slices, dtype):
    return (dtype,) * (2 * slices)


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
def scale_from_word(scale_word):
    """The scale in a scale word with an integer zero, in fp32."""
    return (scale_word & -16).to(gl.float32, bitcast=True)


@gluon.jit
def split_scale_word(scale_word, t):
    """A scale word as the two operands `first` and `second` of `unpack_asm`."""
    if t.FRACTIONAL:
        first = (scale_word & -65536) | ((scale_word >> 16) & 0xFFFF)
        second = (scale_word << 16) | (scale_word & 0xFFFF)
    else:
        first = (scale_word & 0xF) * 0x00010001 | (0x64006400 if t.HALF else 0x43004300)
        second = duplicate(scale_from_word(scale_word), t.HALF) if t.SCALE_WEIGHTS else first
    return first, second


@gluon.jit
def unpack_slices(words, scales, FIRST: gl.constexpr, SLICES: gl.constexpr, t):
    """One, two or four slices of a tile, [row / 16, r, t, v, h, u, slice ...]: what is joined comes last."""
    asm: gl.constexpr = unpack_asm(FIRST, SLICES, t.GROUP, t.FRACTIONAL, t.HALF, t.SCALE_WEIGHTS)
    constraints: gl.constexpr = unpack_constraints(SLICES, t.GROUPS)
    types: gl.constexpr = slice_types(SLICES, t.DTYPE)
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
def wgmma_operand(words, scales, more_words, more_scales, CHUNK: gl.constexpr, t):
    """wgmma's A operand [BN, 16 * SLICES] in registers from a tile's words; with eight slices from two's."""
    operand: gl.constexpr = gl.DotOperandLayout(0, t.MMA, 2)
    if t.SLICES == 8:
        low = unpack_slices(words, scales, 0, 4, t)
        high = unpack_slices(more_words, more_scales, 0, 4, t)
        chunk = gl.permute(gl.join(low, high), [0, 5, 1, 8, 6, 7, 3, 2, 4])
    elif t.SLICES == 4:
        chunk = unpack_slices(words, scales, 0, 4, t)
        chunk = gl.permute(chunk, [0, 5, 1, 6, 7, 3, 2, 4])
    elif t.SLICES == 1:
        chunk = unpack_slices(words, scales, CHUNK % 4, 1, t)
        chunk = gl.permute(chunk, [0, 5, 1, 3, 2, 4])
    else:
        chunk = unpack_slices(words, scales, (CHUNK % 2) * 2, 2, t)
        chunk = gl.permute(chunk, [0, 5, 1, 6, 3, 2, 4])
    return gl.convert_layout(gl.reshape(chunk, [t.BN, 16 * t.SLICES]), operand, assert_trivial=True)
