"""INT8 weights as two INT4 planes for the INT4 kernels on Hopper: byte layout, packing, reference.

An eight-bit code is two codes of four bits, `code + 128 = 16 high + low`, so a weight is the sum of two INT4
weights:

    code * scale = (high - 8) * 16 scale + (low - 0) * scale

The weight's product is one INT4 product along a K twice as long, with x there twice:

    x @ W.T = [x, x] @ [HIGH | LOW].T

The planes lie one behind the other along K, each packed as in `packing.py`:

    words        int32 [N/64, 2 K/64, 512]    HIGH, then LOW
    scale_words  int32 [2 K/group, N]         16 scale and zero 8, then scale and zero 0

x is not copied: its TMA loads start again at the first column for the second plane (`hopper/tma_loads.py`).
INT8 thus needs no kernel of its own, and reads half of bf16's bytes. The price is twice the wgmmas, which
matters with many rows of x. K is a multiple of 256, so that no stage lies in both planes.
"""

import torch
from torch import Tensor

from . import packing
from .decoder import Int4Decoder

PLANES = 2
COLUMN_MULTIPLE = 256
HIGH_ZERO, LOW_ZERO = 8, 0


def pack(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pack codes int8 [N, K] and scales [N, G] into words and scale words, for activations of `dtype`."""
    group_size = codes.shape[1] // scale.shape[1]
    unsigned = codes.view(torch.uint8) ^ 0x80
    planes = (unsigned >> 4, scale.float() * 16, HIGH_ZERO), (unsigned & 0xF, scale.float(), LOW_ZERO)
    words, scale_words = [], []
    for nibbles, factor, zero in planes:
        words.append(packing.pack_words(nibbles))
        zeros = torch.full_like(factor, zero, dtype=torch.uint8)
        scale_words.append(packing.pack_scales(factor, zeros, group_size, dtype))
    return torch.cat(words, 1), torch.cat(scale_words)


def decoder(group_size: int, half: bool) -> Int4Decoder:
    return Int4Decoder(half, min(group_size, packing.MAX_GROUP), fractional=False, planes=PLANES)


def reference_matmul(x: Tensor, words: Tensor, scale_words: Tensor, n: int, group_size: int) -> Tensor:
    """Compute y [M, N] = x [M, K] @ w.T in fp64, with the weight in x's type."""
    twice = torch.cat([x, x], 1)
    return packing.reference_matmul(twice, words, scale_words, n, group_size, fractional=False)
