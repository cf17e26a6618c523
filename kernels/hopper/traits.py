"""Compile-time numbers of the Hopper kernels, as Gluon aggregates.

What CUTLASS calls kernel traits: built once at the top of a kernel from the host's `HopperTile` and `Decoder`
and passed down, so that no device function repeats them. They hold no run-time values.
"""

import math

from ..triton_imports import aggregate, gl, gluon


@gluon.constexpr_function
def iter_stages(k_tiles, slices):
    """Stages in an iteration of the main loop, which takes an even number of chunks or many slices."""
    return 2 if k_tiles * 4 == slices else 1


@gluon.constexpr_function
def words_of(block_shape):
    """32-bit words in a block."""
    return math.prod(block_shape)


@aggregate
class Traits:
    """Tile, ring and decoder, under the names that kernels give them."""

    BM: gl.constexpr
    """Rows of x in a tile of y: wgmma's N."""
    BN: gl.constexpr
    """Rows of the weight in a tile of y: wgmma's M, 64 a warpgroup."""
    DECODER: gl.constexpr
    SCALE_COLUMNS: gl.constexpr
    """Columns of K that one reading of scales serves."""
    PLANES: gl.constexpr
    """How many weights lie one behind the other along K, to be multiplied by the same x and added up."""
    HALF: gl.constexpr
    DTYPE: gl.constexpr
    STAGES: gl.constexpr
    K_TILES: gl.constexpr
    SLICES: gl.constexpr
    CHUNKS: gl.constexpr
    """Chunks of SLICES slices of 16 columns in a stage."""
    ITER_STAGES: gl.constexpr
    SCALE_WEIGHTS: gl.constexpr
    """Scales multiply weights; else the fp32 sums over a chunk."""
    REORDER_X: gl.constexpr
    """Warps between loading and multiplying that reorder x (`reorder_x.py`)."""
    X_BARRIER: gl.constexpr
    """Which of the mbarriers behind those of full stages is the first that counts x's bytes."""
    MMA: gl.constexpr
    """Layout of the fp32 accumulator [BN, BM]."""

    @gluon.constexpr_function
    def __init__(self, tile, decoder, scale_weights):
        self.BM = gl.constexpr(tile.m)
        self.BN = gl.constexpr(tile.n)
        self.DECODER = gl.constexpr(decoder)
        self.SCALE_COLUMNS = gl.constexpr(decoder.scale_columns)
        self.PLANES = gl.constexpr(decoder.planes)
        self.HALF = gl.constexpr(decoder.half)
        self.DTYPE = gl.constexpr(gl.float16 if decoder.half else gl.bfloat16)
        self.STAGES = gl.constexpr(tile.stages)
        self.K_TILES = gl.constexpr(tile.k_tiles)
        self.SLICES = gl.constexpr(tile.slices)
        self.CHUNKS = gl.constexpr(tile.k_tiles * 4 // tile.slices)
        self.ITER_STAGES = gl.constexpr(iter_stages(tile.k_tiles, tile.slices))
        self.SCALE_WEIGHTS = gl.constexpr(scale_weights)
        self.REORDER_X = gl.constexpr(decoder.reorders_x)
        self.X_BARRIER = gl.constexpr(48 if decoder.reorders_x else 0)
        self.MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [tile.n // 16, 1], [16, tile.m, 16]))


@aggregate
class Smem:
    """Byte offsets into the stream-K kernel's one allocation, each a multiple of 1024 but for the mbarriers'.

    0          table        the decoder's, if it has one
    X          x            STAGES * [BM, K_TILES * 64] of 16 bits
    WORDS      words        STAGES * WORD_BYTES
    SCALES     scales       STAGES * SCALE_BYTES
    FULL       mbarriers    a stage's bytes have arrived
    EMPTY      mbarriers    all warps are done with a stage
    SENT       mbarriers    a tail's partial sums are stored (`tail_prefetch.py`)
    X_FULL     mbarriers    a stage's x has arrived, where that is counted by itself, else FULL
    """

    X: gl.constexpr
    WORDS: gl.constexpr
    WORD_BYTES: gl.constexpr
    SCALES: gl.constexpr
    SCALE_BYTES: gl.constexpr
    FULL: gl.constexpr
    EMPTY: gl.constexpr
    SENT: gl.constexpr
    X_FULL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, t, words_block, scale_block):
        bm, stages, k_tiles = t.BM.value, t.STAGES.value, t.K_TILES.value
        word_bytes, scale_bytes = words_of(words_block) * 4, words_of(scale_block) * 4
        x = t.DECODER.value.table_bytes
        words = x + stages * bm * k_tiles * 128
        scales = words + (stages * word_bytes + 1023) // 1024 * 1024
        full = scales + (stages * scale_bytes + 1023) // 1024 * 1024
        self.X = gl.constexpr(x)
        self.WORDS = gl.constexpr(words)
        self.WORD_BYTES = gl.constexpr(word_bytes)
        self.SCALES = gl.constexpr(scales)
        self.SCALE_BYTES = gl.constexpr(scale_bytes)
        self.FULL = gl.constexpr(full)
        self.EMPTY = gl.constexpr(full + 128)
        self.SENT = gl.constexpr(full + 256)
        self.X_FULL = gl.constexpr(full + 8 * t.X_BARRIER.value)
