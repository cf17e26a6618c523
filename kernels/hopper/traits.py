"""Compile-time numbers of the INT4 kernels for Hopper, as Gluon aggregates.

What CUTLASS calls kernel traits: built once at the top of a kernel from the host's `HopperTile` and `Dequant`
and passed down, so that no device function repeats them. They hold no run-time values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@gluon.constexpr_function
def iter_stages(k_tiles, slices):
    """Stages in an iteration of the main loop, which takes an even number of chunks or many slices."""
    return 2 if k_tiles * 4 == slices else 1


@aggregate
class Traits:
    """Tile, ring and dequantization, under the names that kernels give them."""

    BM: gl.constexpr
    """Rows of x in a tile of y: wgmma's N."""
    BN: gl.constexpr
    """Rows of the weight in a tile of y: wgmma's M, 64 a warpgroup."""
    GROUP: gl.constexpr
    GROUPS: gl.constexpr
    """Groups in a tile of 64 columns."""
    FRACTIONAL: gl.constexpr
    HALF: gl.constexpr
    DTYPE: gl.constexpr
    STAGES: gl.constexpr
    K_TILES: gl.constexpr
    SLICES: gl.constexpr
    CHUNKS: gl.constexpr
    """Chunks of SLICES slices of 16 columns in a stage."""
    ITER_STAGES: gl.constexpr
    SCALE_WEIGHTS: gl.constexpr
    """Scales multiply weights; else the fp32 sums of a chunk that is a group."""
    MMA: gl.constexpr
    """Layout of the fp32 accumulator [BN, BM]."""

    @gluon.constexpr_function
    def __init__(self, tile, dequant, scale_weights):
        self.BM = gl.constexpr(tile.m)
        self.BN = gl.constexpr(tile.n)
        self.GROUP = gl.constexpr(dequant.group_size)
        self.GROUPS = gl.constexpr(64 // dequant.group_size if dequant.group_size < 64 else 1)
        self.FRACTIONAL = gl.constexpr(dequant.fractional)
        self.HALF = gl.constexpr(dequant.half)
        self.DTYPE = gl.constexpr(gl.float16 if dequant.half else gl.bfloat16)
        self.STAGES = gl.constexpr(tile.stages)
        self.K_TILES = gl.constexpr(tile.k_tiles)
        self.SLICES = gl.constexpr(tile.slices)
        self.CHUNKS = gl.constexpr(tile.k_tiles * 4 // tile.slices)
        self.ITER_STAGES = gl.constexpr(iter_stages(tile.k_tiles, tile.slices))
        self.SCALE_WEIGHTS = gl.constexpr(scale_weights)
        self.MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [tile.n // 16, 1], [16, tile.m, 16]))


@aggregate
class Smem:
    """Byte offsets into the stream-K kernel's one allocation, each a multiple of 1024 but for the mbarriers'.

    0          x            STAGES * [BM, K_TILES * 64] of 16 bits
    WORDS      words        STAGES * BN * K_TILES * 32 bytes
    SCALES     scale words  STAGES * SCALE_BYTES
    FULL       mbarriers    a stage's bytes have arrived
    EMPTY      mbarriers    all warps are done with a stage
    SENT       mbarriers    a tail's partial sums are stored (`tail_prefetch.py`)
    """

    WORDS: gl.constexpr
    SCALES: gl.constexpr
    SCALE_BYTES: gl.constexpr
    FULL: gl.constexpr
    EMPTY: gl.constexpr
    SENT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, t, scale_rows):
        bm, bn, stages, k_tiles = t.BM.value, t.BN.value, t.STAGES.value, t.K_TILES.value
        scale_bytes = scale_rows * bn * 4
        words = stages * bm * k_tiles * 128
        scales = words + (stages * bn * k_tiles * 32 + 1023) // 1024 * 1024
        full = scales + (stages * scale_bytes + 1023) // 1024 * 1024
        self.WORDS = gl.constexpr(words)
        self.SCALES = gl.constexpr(scales)
        self.SCALE_BYTES = gl.constexpr(scale_bytes)
        self.FULL = gl.constexpr(full)
        self.EMPTY = gl.constexpr(full + 128)
        self.SENT = gl.constexpr(full + 256)
