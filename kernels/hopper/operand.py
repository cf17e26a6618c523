"""Decoded slices joined to wgmma's register operand, for the stream-K and the batch-invariant kernel.

No value changes its register here: `assert_trivial` has the compiler refuse a decoder that would need it.
Decoding itself is defined by each format.
"""

from ..triton_imports import gl, gluon
from .ptx import ptx


@gluon.jit
def join_slices(part, SLICES: gl.constexpr):
    """Join the result of `decode` to one tensor [row / 16, r, t, v, h, u, slice ...]: joined dimensions come
    last.
    """
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
def e4m3_words(words, more_words, CHUNK: gl.constexpr, t):
    """Return wgmma's A registers in E4M3 as words, each with four columns of a row: [row / 16, r, t, v, u,
    slice, tile].

    The words are not yet split into numbers of eight bits, because LLVM would handle each such number
    separately between iterations of a loop.
    """
    if t.SLICES == 2:
        return t.DECODER.decode(words, CHUNK % 2)
    else:
        tile = gl.join(t.DECODER.decode(words, 0), t.DECODER.decode(words, 1))
        if t.SLICES == 4:
            return tile
        else:
            return gl.join(tile, gl.join(t.DECODER.decode(more_words, 0), t.DECODER.decode(more_words, 1)))


@gluon.constexpr_function
def bytes_asm():
    return ptx("out*4 word*4", *[f"mov.b32 $out{i}, $word{i};" for i in range(4)])


@gluon.constexpr_function
def four_types():
    return (gl.float8e4nv,) * 4


@gluon.jit
def e4m3_operand(words, t):
    """Return the result of `e4m3_words` as the A operand [BN, 16 * SLICES].

    Four neighbouring words of a thread become one register in each of four results. The last two dimensions
    of each result are therefore the bytes of a register, and the two joined dimensions say which word the
    bytes come from.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, t.MMA, 4)
    asm: gl.constexpr = bytes_asm()
    types: gl.constexpr = four_types()
    a, b, c, d = gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r,r,r,r", [words], dtype=types, is_pure=True, pack=4
    )
    chunk = gl.join(gl.join(a, b), gl.join(c, d))
    if t.SLICES == 8:
        chunk = gl.permute(chunk, [0, 4, 1, 7, 8, 3, 2, 5, 6])
    elif t.SLICES == 4:
        chunk = gl.permute(chunk, [0, 7, 1, 6, 3, 2, 4, 5])
    else:
        chunk = gl.permute(chunk, [0, 5, 1, 6, 2, 3, 4])
    return gl.convert_layout(gl.reshape(chunk, [t.BN, 16 * t.SLICES]), operand, assert_trivial=True)


@gluon.jit
def wgmma_operand(words, scales, more_words, more_scales, CHUNK: gl.constexpr, t):
    """Return wgmma's A operand [BN, 16 * SLICES] in registers from the words of one tile, or of two tiles if
    there are 8 slices.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, t.MMA, 2)
    if t.SLICES == 8:
        low = join_slices(t.DECODER.decode(words, scales, 0, 4, t), 4)
        high = join_slices(t.DECODER.decode(more_words, more_scales, 0, 4, t), 4)
        chunk = gl.permute(gl.join(low, high), [0, 5, 1, 8, 6, 7, 3, 2, 4])
    elif t.SLICES == 4:
        chunk = join_slices(t.DECODER.decode(words, scales, 0, 4, t), 4)
        chunk = gl.permute(chunk, [0, 5, 1, 6, 7, 3, 2, 4])
    elif t.SLICES == 1:
        chunk = join_slices(t.DECODER.decode(words, scales, CHUNK % 4, 1, t), 1)
        chunk = gl.permute(chunk, [0, 5, 1, 3, 2, 4])
    else:
        chunk = join_slices(t.DECODER.decode(words, scales, (CHUNK % 2) * 2, 2, t), 2)
        chunk = gl.permute(chunk, [0, 5, 1, 6, 3, 2, 4])
    return gl.convert_layout(gl.reshape(chunk, [t.BN, 16 * t.SLICES]), operand, assert_trivial=True)
