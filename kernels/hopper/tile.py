"""Tile shapes of the INT4 kernels for Hopper, their TMA descriptors, and the operands of a launch; host side.

Both kernels are compiled for a `HopperTile` and a `Dequant` (`traits.py` hands them on to the device code).
Which tile serves which M, N and K is for `stream_k_config.py` and `invariant_config.py`.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .unpack import scale_words_layout, words_layout, x_layout

NUM_SMS = 132
SEMAPHORES = 1024
"""Length of `Int4Operand.semaphores`."""


@dataclass(frozen=True)
class Dequant:
    """How codes become weights; one kernel is compiled for each.

    group_size  32, 64 or 128 consecutive k with one scale and zero
    fractional  zeros are not integers: w = (q - 8) * scale + offset, else w = (q - zero) * scale
    half        activations and unpacked weights are fp16, else bf16
    """

    group_size: int
    fractional: bool
    half: bool


@dataclass(frozen=True)
class Int4Operand:
    """A packed weight [N, K] as the kernels take it; the bytes are described in `swap_ab.py`.

    words        int32 [N/64, K/64, 512]
    scale_words  int32 [K/group_size, N rounded up to 64]
    semaphores   int32 [SEMAPHORES], zero before and after every launch: partial sums of a tile that are done
    """

    words: Tensor
    scale_words: Tensor
    semaphores: Tensor
    group_size: int
    fractional: bool

    def dequant(self, dtype: torch.dtype) -> Dequant:
        return Dequant(self.group_size, self.fractional, dtype == torch.float16)


@dataclass(frozen=True)
class HopperTile:
    """A CTA's tile of y and the ring that feeds it.

    m, n         rows of x and rows of the weight in a tile of y
    k_tiles      tiles of 64 columns of K in a stage of the ring: 1, 2 or 4
    stages       of the ring
    slices       slices of 16 columns (wgmma's K) that are unpacked together
    registers    a thread may use
    ctas_per_sm  CTAs that run on an SM at once
    """

    m: int
    n: int
    k_tiles: int
    stages: int
    slices: int
    registers: int
    ctas_per_sm: int

    def num_tiles(self, m: int, n: int) -> int:
        """Tiles of y [m, n]."""
        return triton.cdiv(m, self.m) * triton.cdiv(n, self.n)

    def descriptors(self, x: Tensor, weight: Int4Operand) -> list[TensorDescriptor]:
        """TMA descriptors of a stage: activations, words, scale words."""
        row_tiles, k_tiles, _ = weight.words.shape
        word_rows = weight.words.view(row_tiles, k_tiles * 8, 64)
        scale_rows = max(1, self.k_tiles * 64 // weight.group_size)
        return [
            TensorDescriptor.from_tensor(x, [self.m, self.k_tiles * 64], x_layout()),
            TensorDescriptor.from_tensor(word_rows, [self.n // 64, self.k_tiles * 8, 64], words_layout()),
            TensorDescriptor.from_tensor(weight.scale_words, [scale_rows, self.n], scale_words_layout()),
        ]

    def options(self) -> dict[str, int | bool]:
        """Launch options of both kernels: a warpgroup for each 64 rows of the weight, PDL."""
        return {"num_warps": self.n // 16, "maxnreg": self.registers, "launch_pdl": True}
