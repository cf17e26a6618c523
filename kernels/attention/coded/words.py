"""Packs codes of four or two bits in int16 words, arranged so that one mask extracts two codes.

    words  int16 [..., W]       field f of a word is its bits f * b .. f * b + b, for b bits a code
    codes  [..., F, W]          F = 16 / b fields: word w holds code [f, w] in its field f

Two neighbouring words share one register. A mask leaves two codes, each in the mantissa of a 16-bit float: an
fp16 number with the bare mantissa m is exactly m * 2^-24, and matrix units accept such numbers. Codes
therefore need no instruction that converts them; the scale makes up for the power of two.
"""

import torch
from torch import Tensor

from ...triton_imports import constexpr_function, tl, triton

WORD_BITS = 16


def fields(bits: int) -> int:
    """Codes in a word."""
    return WORD_BITS // bits


def pack(codes: Tensor) -> Tensor:
    """Pack codes uint8 [..., F, W] into int16 [..., W]."""
    count = codes.shape[-2]
    shifts = torch.arange(count, dtype=torch.int32, device=codes.device) * (WORD_BITS // count)
    return (codes.to(torch.int32) << shifts[:, None]).sum(-2, dtype=torch.int32).to(torch.int16)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack words int16 [..., W] to codes int16 [..., F, W]."""
    shifts = torch.arange(fields(bits), dtype=torch.int16, device=words.device) * bits
    return (words.unsqueeze(-2) >> shifts[:, None]).bitwise_and_((1 << bits) - 1)


@constexpr_function
def _masking(field: int, bits: int) -> str:
    """Return a mask for two words. The upper byte of each word is shifted down before masking, because a
    mantissa has only ten bits.
    """
    byte, in_byte = divmod(field * bits, 8)
    mask = (((1 << bits) - 1) << in_byte) * 0x10001
    return f"{{.reg .b32 t; shr.b32 t, $1, {8 * byte}; and.b32 $0, t, {mask};}}"


@constexpr_function
def field_weight(field: int, bits: int) -> int:
    """Return the power of two by which a code is too large if it is not in the lowest field of its byte."""
    return 1 << field * bits % 8


@triton.jit
def field_of(words, FIELD: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Return field FIELD's code times 2^-24 * `field_weight`, exactly, as fp16 shaped as int16 `words`."""
    if ASM:
        asm: tl.constexpr = _masking(FIELD, BITS)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    byte = words >> (FIELD * BITS // 8 * 8)
    return (byte & (((1 << BITS) - 1) << (FIELD * BITS % 8))).to(tl.int16).to(tl.float16, bitcast=True)
