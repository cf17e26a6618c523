"""Converts the tensors of vLLM's quantized layers to weights of ours.

N comes before K: the caller has transposed weights that a checkpoint stores as [K, N].
"""

import torch
from torch import Tensor

from ..layouts.formats.int4 import SYMMETRIC_ZERO, Int4, Int4Weight
from ..layouts.formats.int8 import Int8, Int8Weight
from ..layouts.formats.nvfp4 import NVFP4, NVFP4Weight

NIBBLES = 8
"""Number of 4-bit codes in a word of 32 bits."""


def int4_weight(spec: Int4, words: Tensor, scale: Tensor, zeros: Tensor | None) -> Int4Weight:
    """Make an INT4 weight from tensors of compressed-tensors, GPTQ or AWQ. vLLM has undone AWQ's order of
    columns.

    words: the codes, int32 [N, K/8]; the lowest nibble is the first k
    scale: the scales [N, K/g]
    zeros: the zero points, int32 [N/8, K/g]; the lowest nibble is the first n. None for symmetric weights
    """
    codes = words.contiguous().view(torch.uint8)
    zero_point = symmetric_zeros(scale) if zeros is None else nibbles_of(zeros.t()).t()
    return Int4Weight(spec, codes, scale.contiguous(), zero_point.contiguous())


def int8_weight(spec: Int8, words: Tensor, scale: Tensor) -> Int8Weight:
    """An INT8 weight.

    words: int32 [N, K/4], four codes + 128 each; the lowest byte is the first k
    scale: the scales [N, K/g], or [N, 1] for whole rows
    """
    codes = (words.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)
    return Int8Weight(spec, codes, scale.contiguous())


def nvfp4_weight(codes: Tensor, scale: Tensor, global_scale: Tensor) -> NVFP4Weight:
    """Make an NVFP4 weight. codes: uint8 [N, K/2]; scale: e4m3 [N, K/16]; global_scale: fp32, a
    multiplier.
    """
    return NVFP4Weight(NVFP4(), codes.contiguous(), scale.contiguous(), global_scale.float().reshape(()))


def nibbles_of(words: Tensor) -> Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, 8 * words], the lowest nibble first."""
    shifts = 4 * torch.arange(NIBBLES, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 0xF).to(torch.uint8).flatten(-2)


def symmetric_zeros(scale: Tensor) -> Tensor:
    return torch.full(scale.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=scale.device)
