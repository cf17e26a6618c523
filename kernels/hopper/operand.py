"""Decoded slices joined to wgmma's register operand, for the stream-K and the batch-invariant kernel.

No value changes its register here: `assert_trivial` has the compiler refuse a decoder that would need it.
Decoding itself is defined by each format.
"""

from ..triton_imports import gl, gluon


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
def wgmma_operand(words, scales, more_words, more_scales, CHUNK: gl.constexpr, t):
    """Return wgmma's A operand [BN, 16 * SLICES] in registers from a tile's words; 8 slices: two tiles'."""
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
