"""Tile shapes of the Hopper kernels; host side.

Stream-K and batch-invariant kernel are compiled for a `HopperTile` and a `Decoder` (`traits.py` hands them on
to the device code). `stream_k_config.py` and `invariant_config.py` choose the tile for M, N and K.
"""

from dataclasses import dataclass

from ..triton_imports import triton

NUM_SMS = 132


@dataclass(frozen=True)
class HopperTile:
    """A CTA's tile of y and the ring that feeds it.

    m, n         rows of x and rows of the weight in a tile of y
    k_tiles      tiles of 64 columns of K in a stage of the ring: 1, 2 or 4
    stages       of the ring
    slices       slices of 16 columns (wgmma's K) that are decoded together
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

    def options(self) -> dict[str, int | bool]:
        """Launch options of both kernels: a warpgroup for each 64 rows of the weight, PDL."""
        return {"num_warps": self.n // 16, "maxnreg": self.registers, "launch_pdl": True}
