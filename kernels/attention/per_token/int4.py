"""Four bits for each token and head, between its least and its largest value: the meaning of the codes in
torch.

x[d] = code[d] * scale + zero        scale and zero fp16, of one token and head
words  int16 [..., D/4]              as in words.py: field j of word i is channel i + j * D/4
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..coded.words import pack, unpack

LARGEST_CODE = 15
LEAST_SCALE = 2.0**-24
"""fp16's least number above zero: of a token whose values are all the same."""


@dataclass(frozen=True)
class Int4Tokens:
    """Keys or values as pages hold them. words: int16 [..., D/4]; scales: fp16 [..., 2], scale and zero."""

    words: Tensor
    scales: Tensor


def quantize_reference(x: Tensor) -> Int4Tokens:
    """Code x [..., D] of any float dtype; each code is the nearest one under the scale and the zero as they
    are stored.
    """
    x = x.float()
    zero, largest = x.amin(-1), x.amax(-1)
    scales = torch.stack([((largest - zero) / LARGEST_CODE).clamp(min=LEAST_SCALE), zero], -1).half()
    scale, zero = scales.float().split(1, -1)
    codes = ((x - zero) / scale).round().clamp(0, LARGEST_CODE).to(torch.uint8)
    return Int4Tokens(pack(codes.unflatten(-1, (4, -1))), scales)


def dequantize_reference(stored: Int4Tokens) -> Tensor:
    """fp32 [..., D]."""
    scale, zero = stored.scales.float().split(1, -1)
    return torch.addcmul(zero, unpack(stored.words, 4).flatten(-2).float(), scale)
