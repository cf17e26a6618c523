"""What the two INT4 kernels for Hopper have in common on the host: a compiled form, its TMA descriptors."""

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .unpack import scales_layout, words_layout, x_layout

NUM_SMS = 132
SEMAPHORES = 1024
"""Counters of the parts of tiles that are done; zero, and left so."""


@dataclass(frozen=True)
class HopperTile:
    """One compiled form of a kernel: a tile of y, and how many of its CTAs a multiprocessor holds.

    tiles    tiles of 64 columns in a stage: 1, 2 or 4; slices: of 16 columns unpacked together
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

    def descriptors(
        self, x: Tensor, words: Tensor, scale_words: Tensor, group_size: int
    ) -> list[TensorDescriptor]:
        """Of a stage's activations, words, zeros and scales."""
        row_tiles, k_tiles, _ = words.shape
        word_rows = words.view(row_tiles, k_tiles * 8, 64)
        scale_rows = max(1, self.k_tiles * 64 // group_size)
        return [
            TensorDescriptor.from_tensor(x, [self.m, self.k_tiles * 64], x_layout()),
            TensorDescriptor.from_tensor(word_rows, [self.n // 64, self.k_tiles * 8, 64], words_layout()),
            TensorDescriptor.from_tensor(scale_words, [scale_rows, self.n], scales_layout()),
        ]

    def constants(self, group_size: int, fractional: bool, half: bool) -> dict[str, int | bool]:
        """What both kernels are compiled for."""
        return {
            "BM": self.m,
            "BN": self.n,
            "GROUP": group_size,
            "FRACTIONAL": fractional,
            "HALF": half,
            "STAGES": self.stages,
            "K_TILES": self.k_tiles,
            "SLICES": self.slices,
        }

    def options(self) -> dict[str, int | bool]:
        """How both kernels are launched."""
        return {"num_warps": self.n // 16, "maxnreg": self.registers, "launch_pdl": True}
