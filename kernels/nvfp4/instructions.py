"""The PTX that turns NVFP4's codes and scales into bf16, for the decoders of dense weights and of experts.

The file `packing.py` describes the bits. The file holds plain text: decoders choose the operands and
multiply.
"""

from ..triton_imports import gluon
from . import packing


@gluon.constexpr_function
def both_halves(*bits):
    """Return a mask that has the given bits in each half of a word."""
    return hex(sum(1 << bit for bit in bits) * 0x00010001)


@gluon.constexpr_function
def rotate(target, source, by):
    """Rotate left, by a shift if no significant bit wraps around."""
    if by < 8:
        return f"shl.b32 {target}, {source}, {by};"
    return f"shf.l.wrap.b32 {target}, {source}, {source}, {by};"


@gluon.constexpr_function
def code_lines(out, word, slice_):
    """Extract two codes of a word, times 2^-126; the register t is overwritten."""
    if slice_ == packing.STRAY:
        return [
            f"shr.u32 t, {word}, {packing.STRAY_SHIFT};",
            f"and.b32 t, t, {both_halves(*packing.MANTISSA)};",
            f"lop3.b32 {out}, {word}, {both_halves(*packing.SIGN, *packing.EXPONENT)}, t, 0xEA;",
        ]
    mask = both_halves(*packing.CODE_BITS)
    return [rotate("t", word, packing.SHIFTS[slice_]), f"and.b32 {out}, t, {mask};"]


@gluon.constexpr_function
def scale_lines(out, word, second):
    """Extract two scales of a word, times 2^119; the register t is overwritten."""
    mask = both_halves(*range(packing.SCALE_BIT, packing.SCALE_BIT + 8))
    turned = rotate("t", word, packing.SCALE_SHIFT) if second else f"mov.b32 t, {word};"
    return [turned, f"lop3.b32 {out}, t, {mask}, {both_halves(12, 13, 14)}, 0xEA;"]
