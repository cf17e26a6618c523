"""Inline PTX of the IQ2_XXS product: a lane's words to registers of `mma.m16n8k16`, and its sums to scale.

Each operation is a Gluon function with its PTX above it; a thread has four values of every tensor
(`pack=4`). The codebook lies at the start of shared memory, at `global_smem` (a test looks), 256 bytes an
entry: its 8 numbers in 16 bits, 16 bytes, eight times, and 128 bytes that nobody reads. Lane i reads copy
i % 8, so the eight lanes that a 16-byte load serves at once never meet in a bank; and an address is the
index as the second byte of the lane's own offset, one PRMT.

Instructions for eight weights, one look-up:

    prmt                    the address            1
    lds.128                 four pairs of numbers  1
    4 (shl, lop3)           their signs            8
    mma                     a product of 256       1
    3 shl, 4 lop3 a word    the eighth signs       7/4
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ENTRY_BYTES = gl.constexpr(256)


@gluon.constexpr_function
def ptx(operands, *lines):
    """PTX in braces with `$name` replaced by `$0`, `$1`, ... in the order of `operands`; `name*4` is name0
    to name3."""
    names = []
    for operand in operands.split():
        name, _, count = operand.partition("*")
        names += [f"{name}{i}" for i in range(int(count))] if count else [name]
    text = "{\n" + "\n".join(lines) + "\n}"
    for name in sorted(names, key=len, reverse=True):
        text = text.replace("$" + name, f"${names.index(name)}")
    return text


@gluon.constexpr_function
def prepare_asm():
    lines = [
        ".reg .b32 v, w, s, h;",
        ".reg .f32 f, d;",
        ".reg .b16 low, high;",
        "mov.b32 {low, high}, $scale0;",
    ]
    for row in range(2):
        index, sign = 2 * row, 2 * row + 1
        lines += [
            f"mov.b32 $out{index}, $word{index};",
            f"and.b32 w, $word{sign}, 0x0FFFFFFF;",
            f"shl.b32 v, $word{sign}, 16;", "xor.b32 v, v, w;",
            "shl.b32 s, v, 8;", "xor.b32 v, v, s;",
            "shl.b32 s, v, 4;", "xor.b32 v, v, s;",
            f"lop3.b32 $out{sign}, v, 0xF0000000, w, 0xEA;",
            f"shr.u32 h, $word{sign}, 9;",
            "lop3.b32 h, h, 0x00780000, 0x3F800000, 0xEA;",  # 1 + s / 16
            "mov.b32 f, h;", "fma.rn.f32 f, f, 0f40800000, 0fC0780000;",  # (s + 0.5) / 4
            f"cvt.f32.f16 d, {'high' if row else 'low'};",
            f"mul.f32 $factor{2 * row}, f, d;", f"mov.f32 $factor{2 * row + 1}, $factor{2 * row};",
        ]  # fmt: skip
    return ptx("out*4 factor*4 word*4 scale*4", *lines)


@gluon.jit
def prepare(words, scales):
    """A lane's words with all eight signs in place, and what its own block's sums of rows g, g+8 are worth.

    Returns (indices of g, signs of g, indices of g+8, signs of g+8) and fp32 (g, g, g+8, g+8), the scale of
    block t.
    """
    return gl.inline_asm_elementwise(
        prepare_asm(), "=&r,=&r,=&r,=&r,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r", [words, scales],
        dtype=(gl.int32, gl.float32), is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def decode_asm(block):
    lines = [".reg .b32 a, s, base;", "mov.u32 base, global_smem;"]
    for row in range(2):
        index, sign = 2 * row, 2 * row + 1
        out = [f"${half}{row + k}" for half in ("first", "second") for k in (0, 2)]
        lines += [
            f"prmt.b32 a, $word{index}, $lane0, {0x7604 | block << 4};",
            "add.u32 a, a, base;",
            f"ld.shared.v4.b32 {{{','.join(out)}}}, [a];",
        ]
        for pair in range(4):
            shift = 15 - 4 * pair - block
            lines.append(f"shl.b32 s, $word{sign}, {shift};")
            lines.append(f"lop3.b32 {out[pair]}, s, 0x80008000, {out[pair]}, 0x6A;")
    return ptx("first*4 second*4 word*4 lane*4", *lines)


@gluon.jit
def decode(words, lane_offset, BLOCK: gl.constexpr):
    """The two A operands of a block's 32 columns: weights 0 to 3 of every vector, and 4 to 7."""
    asm: gl.constexpr = decode_asm(BLOCK)
    return gl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [words, lane_offset],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def multiply_asm(half):
    kind = "f16" if half else "bf16"
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    sums, before = "{$sum0,$sum1,$sum2,$sum3}", "{$before0,$before1,$before2,$before3}"
    first, second = "{$first0,$first1,$first2,$first3}", "{$second0,$second1,$second2,$second3}"
    lines = [
        f"{mma} {sums}, {first}, {{$x0,$x1}}, {before};",
        f"{mma} {sums}, {second}, {{$x2,$x3}}, {sums};",
    ]
    return ptx("sum*4 first*4 second*4 x*4 before*4", *lines)


@gluon.jit
def multiply(first, second, x, before, HALF: gl.constexpr):
    """`before` plus a block's product: 16 rows of the weight, 8 of x. x: a lane's eight numbers, of row g
    at vector t."""
    asm: gl.constexpr = multiply_asm(HALF)
    return gl.inline_asm_elementwise(
        asm, "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f", [first, second, x, before],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def add_scaled_asm(block):
    """From lane 4g + block, whose own block it is, to the four lanes that hold sums of rows g and g+8."""
    lines = [
        ".reg .b32 l, f, h;", "mov.u32 l, %laneid;", "and.b32 l, l, 28;", f"or.b32 l, l, {block};",
        "shfl.sync.idx.b32 f, $factor0, l, 31, 0xffffffff;",
        "shfl.sync.idx.b32 h, $factor2, l, 31, 0xffffffff;",
    ]  # fmt: skip
    lines += [f"fma.rn.f32 $total{i}, $sum{i}, {'h' if i > 1 else 'f'}, $before{i};" for i in range(4)]
    return ptx("total*4 sum*4 factor*4 before*4", *lines)


@gluon.jit
def add_scaled(before, sums, factors, BLOCK: gl.constexpr):
    """`before` plus the sums of one block times its scales."""
    asm: gl.constexpr = add_scaled_asm(BLOCK)
    return gl.inline_asm_elementwise(
        asm, "=&f,=&f,=&f,=&f," + "f," * 11 + "f", [sums, factors, before],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def add_own_scaled_asm():
    """Even columns are blocks of the low chunk, odd ones of the high chunk; 0 and 1 are row g's, 2 and 3
    row g+8's."""
    factors = ("$low0", "$high0", "$low2", "$high2")
    lines = [f"fma.rn.f32 $total{i}, $sum{i}, {factors[i]}, $before{i};" for i in range(4)]
    return ptx("total*4 sum*4 low*4 high*4 before*4", *lines)


@gluon.jit
def add_own_scaled(before, sums, low, high):
    """`before` plus the sums of a lane's own two blocks times their scales: those of each chunk's block t."""
    return gl.inline_asm_elementwise(
        add_own_scaled_asm(), "=&f,=&f,=&f,=&f," + "f," * 15 + "f", [sums, low, high, before],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip
