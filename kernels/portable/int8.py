"""INT8 weights as two INT4 planes for the portable kernel; why that is exact is in `kernels/int4/planes.py`.

words        int32 [N/64, 2 K/128, 64, 16]    HIGH, then LOW, each as the experts' INT4 (`experts/int4.py`)
scale_words  int32 [2 K/128 * s, N]           16 scale and zero 8, then scale and zero 0
"""

import torch
from torch import Tensor

from ..experts import int4
from ..int4.planes import HIGH_ZERO, LOW_ZERO, PLANES

__all__ = ["PLANES", "pack"]


def pack(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pack codes int8 [N, K] and scales [N, G] into words and scale words, for activations of `dtype`."""
    group_size = codes.shape[1] // scale.shape[1]
    unsigned = codes.view(torch.uint8) ^ 0x80
    high = unsigned >> 4, scale.float() * 16, HIGH_ZERO
    low = unsigned & 0xF, scale.float(), LOW_ZERO
    packed = [_pack_plane(*plane, group_size, dtype) for plane in (high, low)]
    words, scale_words = zip(*packed, strict=True)
    return torch.cat(words, dim=1), torch.cat(scale_words)


def _pack_plane(
    nibbles: Tensor, scale: Tensor, zero: int, group_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    codes = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
    zeros = torch.full_like(scale, zero, dtype=torch.uint8)
    parts = codes.unsqueeze(0), scale.unsqueeze(0), zeros.unsqueeze(0)
    words, scale_words = int4.pack(*parts, group_size, dtype)
    return words[0], scale_words[0]
