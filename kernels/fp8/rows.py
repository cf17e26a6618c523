"""E4M3 weights as they are stored, for the Hopper kernel: wgmma takes both operands from shared memory.

codes  float8_e4m3fn [N, K]   TMA loads them in 128-byte swizzle, as it loads x
scale  fp32 [1, N]            multiplies the sums of each 128 columns
"""

from dataclasses import dataclass

from ..hopper.decoder import Decoder
from ..hopper.ptx import load_shared
from ..hopper.tile import HopperTile
from ..triton_imports import gl, gluon


@gluon.jit
def scale_corner(k_stage, tile_n, t):
    return k_stage * 0, tile_n * t.BN


@gluon.jit
def read_sum_scales(slot, CHUNK: gl.constexpr, t, smem):
    """Return the scales of the rows, [BN, 1]."""
    row = gl.arange(0, t.BN, gl.SliceLayout(1, t.MMA))
    words = load_shared(slot * smem.SCALE_BYTES + row * 4, smem.SCALES)
    return gl.expand_dims(words.to(gl.float32, bitcast=True), 1)


@dataclass(frozen=True)
class E4M3Rows(Decoder):
    """Rows of E4M3 with a scale each, for activations in E4M3."""

    name = "fp8"
    x_bits = 8
    in_shared = True
    factor_by_row = True
    scale_corner = scale_corner
    read_sum_scales = read_sum_scales

    def words_block(self, tile: HopperTile) -> list[int]:
        return [tile.n, tile.k_tiles * 64]

    def scale_block(self, tile: HopperTile) -> list[int]:
        return [1, tile.n]

    def scales_sums(self, tile: HopperTile) -> bool:
        return True
