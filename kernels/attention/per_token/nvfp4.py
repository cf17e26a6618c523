"""NVFP4 keys and values: E2M1 codes, an E4M3 scale for 16 channels, one fp32 scale a head; in torch.

x[d] = e2m1(code[d]) * scale[d // 16] * head_scale

A group's largest value becomes 6 or 4, whichever leaves the smaller squared error (Cook et al., "Four Over
Six", arXiv:2512.02010): E2M1 is coarsest where values are largest, and large keys decide what attention sees.

words  int16 [..., D/4]     code j of word i is channel c * D/4 + j * D/16 + 4s + 2h + l, where
                            i = 16s + 8h + 2c + l in mixed radix (h, l < 2, c < 4); of heads below 64
                            channels, C = D/16 of them instead of four: c * D/C + ...

A thread that multiplies matrices holds words 2c, 2c + 1, 2c + 8 and 2c + 9 of every sixteen: a quarter of the
head. The scales that the thread needs of a token are therefore adjacent, and each scale belongs to whole
fields of the thread's words. The signs and magnitudes of codes are placed so that few shifts and masks move
the codes of two words to the places that they have in fp16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
LARGEST_IN_GROUP = (6.0, 4.0)
SIGN_SHIFTS, MAGNITUDE_SHIFTS = (0, 3, 1, 2), (0, 3, 6, 9)
"""Of a word's four codes, to bit 15 and to bits 11 .. 9."""


@dataclass(frozen=True)
class NVFP4Tokens:
    """Keys or values as pages hold them. words: int16 [..., D/4]; scales: float8_e4m3fn [..., D/16]."""

    words: Tensor
    scales: Tensor


def quantize_reference(x: Tensor, head_scale: Tensor) -> NVFP4Tokens:
    """Code x [..., H, D] of any float dtype under head_scale, fp32 [H]."""
    groups = (x.float() / head_scale[:, None]).unflatten(-1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(-1)
    (scales, codes, error), (other_scales, other_codes, other_error) = (
        _rounded(groups, (largest / to).clamp(max=E4M3_MAX)) for to in LARGEST_IN_GROUP
    )
    other = other_error < error
    scales = torch.where(other, other_scales, scales).to(torch.float8_e4m3fn)
    codes = torch.where(other[..., None], other_codes, codes).flatten(-2)
    return NVFP4Tokens(pack(codes.to(torch.int32)), scales)


def dequantize_reference(stored: NVFP4Tokens, head_scale: Tensor) -> Tensor:
    """fp32 [..., H, D]."""
    codes = unpack(stored.words)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << exponent >> 1)
    signed = halves.to(torch.int8) * (1 - 2 * (codes >> 3).to(torch.int8))
    groups = signed.unflatten(-1, (-1, GROUP_SIZE)) * (stored.scales.float() * 0.5)[..., None]
    return groups.flatten(-2).mul_(head_scale[:, None])


def pack(codes: Tensor) -> Tensor:
    """Pack codes int32 [..., D], each a sign above three bits of magnitude, into words int16 [..., D/4]."""
    quarters = min(4, codes.shape[-1] // GROUP_SIZE)
    by_field = codes.unflatten(-1, (quarters, 4, -1, 2, 2)).unbind(-4)
    words = torch.zeros_like(by_field[0])
    for code, sign, magnitude in zip(by_field, SIGN_SHIFTS, MAGNITUDE_SHIFTS, strict=True):
        words |= ((code & 8) << 12 >> sign) | ((code & 7) << 9 >> magnitude)
    return words.to(torch.int16).movedim(-4, -2).flatten(-4)


def unpack(words: Tensor) -> Tensor:
    """Unpack words int16 [..., D/4] to codes int32 [..., D]."""
    quarters = min(4, words.shape[-1] * 4 // GROUP_SIZE)
    words = words.to(torch.int32).unflatten(-1, (-1, 2, quarters, 2)).movedim(-2, -4)
    by_field = [
        ((words << sign >> 12) & 8) | ((words << magnitude >> 9) & 7)
        for sign, magnitude in zip(SIGN_SHIFTS, MAGNITUDE_SHIFTS, strict=True)
    ]
    return torch.stack(by_field, -4).flatten(-5)


def _rounded(groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales in E4M3, the nearest codes (ties to the even code), and each group's squared error.

    Steps are 0.5 up to 2, 1 up to 4 and 2 up to 6.
    """
    scales = scales.to(torch.float8_e4m3fn).float()
    # A group too small for any scale is a group of zeros.
    inverse = torch.where(scales > 0, 1 / scales, 0.0)[..., None]
    magnitude = (groups * inverse).abs().clamp(max=E2M1_MAX)
    low, middle, high = (magnitude * 2).round(), magnitude.round(), (magnitude * 0.5).round()
    code = torch.where(magnitude < 2, low, torch.where(magnitude < 4, middle + 2, high + 4))
    value = torch.where(magnitude < 2, low * 0.5, torch.where(magnitude < 4, middle, high * 2))
    error = (groups.abs() - value * scales[..., None]).square().sum(-1)
    return scales, code + 8 * (groups < 0), error
