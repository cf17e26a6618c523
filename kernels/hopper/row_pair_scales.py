"""Reads scales for pairs of rows from the ring: shared by NVFP4's and IQ2_XXS's decoders.

A tile of 64 rows and 64 columns has 64 words of scales, two for each pair of rows r and r + 8 of a warp:

    word index   w . r . word
    bits         2   3   1

The meaning of a word's bits is left to the decoders.
"""

from ..triton_imports import gl, gluon
from .ptx import load_shared_v2


@gluon.jit
def scale_offset(warp, r, quad, t):
    """Return where, in bytes from the start of a stage, a lane's two words of the first tile lie."""
    return (warp // 4) * (t.K_TILES * 256) + ((warp % 4) * 8 + r) * 8 + quad * 0


@gluon.jit
def scale_corner(k_stage, tile_n, t):
    return tile_n * (t.BN // 64), k_stage * t.K_TILES, 0


@gluon.jit
def read_scale_words(slot, row, TILE: gl.constexpr, t, smem):
    """Read the two words of the lane's rows, [row / 16, r, t] each."""
    return load_shared_v2(row + slot * smem.SCALE_BYTES, smem.SCALES + TILE * 256)


def scale_block(n: int, k_tiles: int) -> list[int]:
    """Return the part of `scales` that TMA loads for a stage."""
    return [n // 64, k_tiles, 64]
