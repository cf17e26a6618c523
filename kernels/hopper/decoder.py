"""The decoder interface of the Hopper kernels: a packed format's bytes in the ring become wgmma's operand.

Each format has one subclass, in its own folder. Packing is defined beside each decoder. Scheduling, loading
and summing are the same for all formats and are defined elsewhere.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ..triton_imports import JITFunction
from .tile import HopperTile


@dataclass(frozen=True)
class Decoder(ABC):
    """A format's parameters and its device functions; both kernels are compiled for each decoder.

    What a format brings:

    * Two operands that TMA loads for each stage of the ring, besides the activations:

          words   int32 [N/64, K/64 * word_rows, 64]   tiles of 64 rows and 64 columns of the weight
          scales  int32, of any shape                  `scale_block` and `scale_corner` say which part

      A stage is `K_TILES` tiles along K of BN / 64 tiles along N.
    * Functions that read a lane's part of a tile from the ring. What they return is opaque to the main loop:
      a tensor or a tuple of tensors, which `decode` is given.
    * `decode`, which turns that into bf16 or fp16 registers exactly where wgmma wants its first operand:
      with `lane = 4 r + t`, warp w of four, for slice j of 16 columns

          row = 16 w + 8 u + r        column = 16 j + 8 v + 2 t + h

      h is the half of a register, and u, v choose one of four registers.
    * Where it looks codes up, `fill_table` and how many bytes of shared memory the table takes, a multiple of
      1024; it lies at the start. What it is filled from is `PackedOperand.table`.
    * Whether it wants x's columns in another order: `reorder_x.py`.
    * What the epilogue multiplies by, if anything, is no function: it is `PackedOperand.factor`.

    The device functions, `@gluon.jit` module functions that the subclass names as class attributes; t is
    `Traits`, smem `Smem`, TILE which tile along K of the stage:

        lane_offsets(warp, r, quad, t)          byte offsets of a lane in a stage's words and in its scales
        scale_corner(k_stage, tile_n, t)        TMA coordinates of the scales of stage `k_stage` of K
        read_words(slot, lane, TILE, t, smem)   the lane's words of a tile, from the stream-K kernel's ring
        read_scales(slot, row, TILE, t, smem)   what multiplies them, as `decode` wants it
        load_words(words, TILE, t)              the same for the batch-invariant kernel, whose ring Gluon
        load_scales(scales, TILE, t)            lays out: `words` and `scales` are one slot's shared memory
        decode(words, scales, FIRST, SLICES, t) slices FIRST .. FIRST + SLICES - 1 of a tile, SLICES 1, 2 or
                                                4: a tuple of 2 * SLICES tensors [row / 16, r, t, v, h],
                                                number 2 i + u
        read_sum_scales(slot, CHUNK, t, smem)   [BN, 1], only where `scales_sums` is true
        fill_table(memory, table, t, smem)      by the consumer warps, only where `table_bytes` is not 0

    A format that is `in_shared` has no words, but rows of E4M3, which wgmma takes from shared memory: it
    brings `scale_corner` and `read_sum_scales` alone.

    A format without `load_words` and `load_scales` has no batch-invariant kernel.

    half  activations and decoded weights are fp16, else bf16
    """

    half: bool

    name: ClassVar[str]
    """Before the kernel's name in profiles."""
    word_rows: ClassVar[int]
    """Rows of 64 words in a tile of 64 by 64: as many as a weight has bits, times two."""

    lane_offsets: ClassVar[JITFunction]
    scale_corner: ClassVar[JITFunction]
    read_words: ClassVar[JITFunction]
    read_scales: ClassVar[JITFunction]
    load_words: ClassVar[JITFunction | None] = None
    load_scales: ClassVar[JITFunction | None] = None
    decode: ClassVar[JITFunction]
    fill_table: ClassVar[JITFunction | None] = None
    table_bytes: ClassVar[int] = 0
    reorders_x: ClassVar[bool] = False
    x_bits: ClassVar[int] = 16
    """Of an activation: 8 if weights are decoded to E4M3, and activations are E4M3."""
    in_shared: ClassVar[bool] = False
    """The weight is rows of E4M3, which wgmma takes from shared memory."""
    factor_by_row: ClassVar[bool] = False
    """`PackedOperand.factor` has a number for each row of x, else one for all."""
    read_sum_scales: ClassVar[JITFunction | None] = None

    @property
    def scale_columns(self) -> int:
        """Columns of K that one `read_scales` covers: 64, or 128 if two tiles share their scales."""
        return 64

    @property
    def planes(self) -> int:
        """Planes: 1, or 2 if the weight is the sum of two that are stored one behind the other along K.

        If there are two planes, each has a multiple of 256 columns, so that no stage of the ring lies in
        both.
        """
        return 1

    def words_block(self, tile: HopperTile) -> list[int]:
        """The part of `words` that TMA loads for a stage."""
        return [tile.n // 64, tile.k_tiles * self.word_rows, 64]

    @abstractmethod
    def scale_block(self, tile: HopperTile) -> list[int]:
        """The part of `scales` that TMA loads for a stage."""

    def scales_sums(self, tile: HopperTile) -> bool:
        """Whether scales multiply the fp32 sums over a chunk of 128 columns instead of the weights."""
        return False

    @property
    def cache_key(self) -> str:
        """Triton's cache key, so that no compiled kernel outlives the source of a decoder."""
        functions = [function for function in vars(type(self)).values() if isinstance(function, JITFunction)]
        return "-".join([repr(self), *(function.cache_key for function in functions)])
