"""IQ2_XXS, llama.cpp's 2.06-bit format: codebook entries of eight weights, signs apart, two levels of scales.

The codebook is in `kernels/iq2_xxs/grid.py`; `pipeline/gguf_file/` defines how GGUF files hold IQ2_XXS
weights.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.iq2_xxs.grid import LENGTH, SIGN_PATTERNS, grid, signs
from .int4 import Int4
from .weight_format import WEIGHT_FORMATS, Weight

SUPER_BLOCK, BLOCK = 256, 32
VECTORS = BLOCK // LENGTH
BLOCK_WORDS = 2
SIGN_BITS, BLOCK_SCALE_BITS = 7, 4
BITS = (8 * BLOCK_WORDS * 4 * (SUPER_BLOCK // BLOCK) + 16) / SUPER_BLOCK


@dataclass(frozen=True)
class IQ2XXS:
    """The spec of IQ2_XXS, which has no parameters."""

    name: ClassVar[str] = "iq2-xxs"
    shared: ClassVar[tuple[str, ...]] = ()
    column_multiple: ClassVar[int] = SUPER_BLOCK
    label: ClassVar[str] = "IQ2_XXS"
    key: ClassVar[str] = "iq2-xxs"

    @property
    def weight_class(self) -> "type[IQ2XXSWeight]":
        return IQ2XXSWeight

    def refuses(self, n: int, k: int) -> str | None:
        return f"K = {k} is no multiple of {SUPER_BLOCK}" if k % SUPER_BLOCK else None

    def nearest(self, n: int, k: int) -> Int4 | None:
        """Return symmetric INT4 in groups of 32; for such a K llama.cpp too takes four bits in blocks of 32
        (IQ4_NL).
        """
        return None if k % BLOCK else Int4(BLOCK, symmetric=True)

    def beside_experts(self) -> "IQ2XXS":
        return self

    def bits_per_weight(self, n: int, k: int) -> float:
        return BITS

    def nbytes(self, n: int, k: int) -> int:
        return n * (k // SUPER_BLOCK) * (2 + 4 * BLOCK_WORDS * (SUPER_BLOCK // BLOCK))

    def random(self, n: int, k: int, device: torch.device) -> "IQ2XXSWeight":
        words = torch.randint(-(2**31), 2**31, (n, BLOCK_WORDS * k // BLOCK), device=device)
        scale = torch.rand(n, k // SUPER_BLOCK, device=device).add(0.5).mul(5e-4)
        return IQ2XXSWeight(self, words.to(torch.int32), scale.to(torch.float16))

    @classmethod
    def variants(cls) -> "list[IQ2XXS]":
        return [cls()]


@dataclass(frozen=True)
class IQ2XXSWeight(Weight):
    """A linear layer's weight in IQ2_XXS, `w = scale * (0.5 + s) / 4 * codebook[index] * sign`.

    words: int32 [N, K/16], two words for every block of 32 weights, which is four vectors of eight. The first
           word is four bytes: the codebook index of each vector. The second word holds, from the lowest bit,
           seven signs for each vector (a set bit is minus; the eighth sign makes the number of minus signs
           even), then the block's scale s, 0..15
    scale: float16 [N, K/256]

    The order of operations is ggml's, so the fp32 values equal ggml's bit for bit.
    """

    spec: IQ2XXS
    words: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * BLOCK // BLOCK_WORDS

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        n, k = self.shape
        device = self.words.device
        vectors = grid(device)[self.indices().int()]
        vectors.mul_(signs(device)[self.sign_patterns().int()])
        return vectors.view(n, -1, BLOCK).mul_(self.scales_of_blocks().unsqueeze(-1)).view(n, k).to(dtype)

    def indices(self) -> Tensor:
        """Return the codebook index of each vector, uint8 [N, K/32, 4]."""
        first = self.words.view(self.shape[0], -1, BLOCK_WORDS)[..., 0]
        return first.unsqueeze(-1).bitwise_right_shift(_shifts(8, first.device)).bitwise_and_(0xFF)

    def sign_patterns(self) -> Tensor:
        """Return the seven stored signs of each vector, int32 [N, K/32, 4]."""
        second = self.words.view(self.shape[0], -1, BLOCK_WORDS)[..., 1]
        shifts = _shifts(SIGN_BITS, second.device)
        return second.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(SIGN_PATTERNS - 1)

    def scales_of_blocks(self) -> Tensor:
        """Return the factor of each block's codebook entries, fp32 [N, K/32]."""
        return (self.scale.float().unsqueeze(-1) * (self.block_scales().float() + 0.5) * 0.25).flatten(1)

    def block_scales(self) -> Tensor:
        """Return each block's code of its scale, 0..15, int32 [N, K/256, 8]."""
        second = self.words.view(*self.scale.shape, -1, BLOCK_WORDS)[..., 1]
        return (second >> (VECTORS * SIGN_BITS)) & (2**BLOCK_SCALE_BITS - 1)


def pack_iq2_xxs(indices: Tensor, patterns: Tensor, block_scales: Tensor) -> Tensor:
    """Return `words` int32 [N, K/16] of an IQ2XXSWeight.

    indices: [N, K/32, 4], 0..255;  patterns: [N, K/32, 4], 0..127;  block_scales: [N, K/32], 0..15
    """
    device = indices.device
    first = (indices.int() << _shifts(8, device)).sum(-1, dtype=torch.int32)
    second = (patterns.int() << _shifts(SIGN_BITS, device)).sum(-1, dtype=torch.int32)
    second |= block_scales.int() << (VECTORS * SIGN_BITS)
    return torch.stack((first, second), dim=-1).flatten(1)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, VECTORS * bits, bits, dtype=torch.int32, device=device)


WEIGHT_FORMATS.add(IQ2XXS.name, IQ2XXS)
