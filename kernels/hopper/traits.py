"""Compile-time numbers of the Hopper kernels, as Gluon aggregates.

As in CUTLASS, traits are built once at the top of a kernel, from the host's `HopperTile` and `Decoder`, and
passed down, so that no device function computes them again. Traits hold no run-time values.
"""

import math

from ..triton_imports import WHOLE_VIEWS, aggregate, gl, gluon, reinterpret


@gluon.constexpr_function
def iter_stages(k_tiles, slices):
    """The stages in an iteration of the main loop, which takes an even number of chunks or many slices."""
    return 2 if k_tiles * 4 == slices else 1


@gluon.constexpr_function
def numbers_in(block_shape):
    return math.prod(block_shape)


@gluon.constexpr_function
def round_up(number, unit):
    return -(-number // unit) * unit


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
    X_BITS: gl.constexpr
    """Of an activation and, where wgmma takes it, of a weight."""
    IN_SHARED: gl.constexpr
    """wgmma takes the weight from shared memory, in E4M3."""
    WORD_BYTES: gl.constexpr
    """Of an element of the weight's ring."""
    FACTOR_BY_ROW: gl.constexpr
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
    HALVES: gl.constexpr
    """2 if an accumulator has half of the rows of x, since as many sums go beside it (`halves_mainloop`)."""
    MMA: gl.constexpr
    """Layout of the fp32 accumulator [BN, BM / HALVES]."""

    @gluon.constexpr_function
    def __init__(self, tile, decoder, scale_weights):
        self.BM = gl.constexpr(tile.m)
        self.BN = gl.constexpr(tile.n)
        self.DECODER = gl.constexpr(decoder)
        self.SCALE_COLUMNS = gl.constexpr(decoder.scale_columns)
        self.PLANES = gl.constexpr(decoder.planes)
        self.HALF = gl.constexpr(decoder.half)
        self.DTYPE = gl.constexpr(gl.float16 if decoder.half else gl.bfloat16)
        self.X_BITS = gl.constexpr(decoder.x_bits)
        self.IN_SHARED = gl.constexpr(decoder.in_shared)
        self.WORD_BYTES = gl.constexpr(1 if decoder.in_shared else 4)
        self.FACTOR_BY_ROW = gl.constexpr(decoder.factor_by_row)
        self.STAGES = gl.constexpr(tile.stages)
        self.K_TILES = gl.constexpr(tile.k_tiles)
        self.SLICES = gl.constexpr(tile.slices)
        self.CHUNKS = gl.constexpr(tile.k_tiles * 4 // tile.slices)
        self.ITER_STAGES = gl.constexpr(iter_stages(tile.k_tiles, tile.slices))
        self.SCALE_WEIGHTS = gl.constexpr(scale_weights)
        self.REORDER_X = gl.constexpr(decoder.reorders_x)
        self.X_BARRIER = gl.constexpr(48 if decoder.reorders_x else 0)
        halves = 2 if not scale_weights and tile.m == 256 else 1
        shape = [16, tile.m // halves, 256 // decoder.x_bits]
        self.MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [tile.n // 16, 1], shape))
        self.HALVES = gl.constexpr(halves)


@aggregate
class Smem:
    """Byte offsets into the stream-K kernel's one allocation.

    Each ring begins at a multiple of its slots' bytes (`Slots`), and of 1024.

    0          table        the decoder's, if it has one
    X          x            STAGES * [BM, K_TILES * 64] of X_BITS
    WORDS      words        STAGES * WORD_BYTES
    SCALES     scales       STAGES * SCALE_BYTES
    FULL       mbarriers    a stage's bytes have arrived
    EMPTY      mbarriers    all warps are done with a stage
    SENT       mbarriers    a tail's partial sums are stored (`tail_prefetch.py`)
    X_FULL     mbarriers    a stage's x has arrived, where that is counted by itself, else FULL
    TOTAL                   with WHOLE_VIEWS a multiple of everything that is viewed in it
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
    TOTAL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, t, words_block, scale_block):
        stages, x_bytes = t.STAGES.value, t.BM.value * t.K_TILES.value * 8 * t.X_BITS.value
        word_bytes = numbers_in(words_block) * t.WORD_BYTES.value
        scale_bytes = numbers_in(scale_block) * 4
        x = t.DECODER.value.table_bytes
        words = round_up(x + stages * x_bytes, max(1024, word_bytes))
        scales = round_up(words + stages * word_bytes, max(1024, scale_bytes))
        full = round_up(scales + stages * scale_bytes, 1024)
        self.X = gl.constexpr(x)
        self.WORDS = gl.constexpr(words)
        self.WORD_BYTES = gl.constexpr(word_bytes)
        self.SCALES = gl.constexpr(scales)
        self.SCALE_BYTES = gl.constexpr(scale_bytes)
        self.FULL = gl.constexpr(full)
        self.EMPTY = gl.constexpr(full + 128)
        self.SENT = gl.constexpr(full + 256)
        self.X_FULL = gl.constexpr(full + 8 * t.X_BARRIER.value)
        # All are powers of two, and a table's blocks no larger than x's.
        unit = max(1024, x_bytes, word_bytes, scale_bytes) if WHOLE_VIEWS else 1024
        self.TOTAL = gl.constexpr(round_up(full + 1024, unit))


@aggregate
class Slots:
    """A ring in the stream-K kernel's one allocation: slot i is block FIRST + i of a view of the whole
    allocation.

    Triton 3.8 and 3.9 refuse a view that begins at the ring's first slot and holds all its slots.
    """

    view: gl.shared_memory_descriptor
    FIRST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, view, first):
        self.view = view
        self.FIRST = gl.constexpr(first)

    @gluon.jit
    def index(self, slot):
        return self.view.index(slot + self.FIRST)


@gluon.jit
def slots_of(memory, desc, OFFSET: gl.constexpr, smem):
    """Return the ring of `desc`'s blocks that begins at byte OFFSET, a multiple of a block's bytes."""
    block_bytes: gl.constexpr = numbers_in(desc.block_shape) * (desc.dtype.primitive_bitwidth // 8)
    gl.static_assert(OFFSET % block_bytes == 0)
    view = reinterpret(memory, desc.dtype, [smem.TOTAL // block_bytes] + desc.block_shape, desc.layout)  # noqa: RUF005
    return Slots(view, OFFSET // block_bytes)
