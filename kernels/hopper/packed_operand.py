"""A packed weight for the Hopper kernels, and the TMA descriptors of its stages; host side."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from ..triton_imports import TensorDescriptor, gl
from .decoder import Decoder
from .tile import HopperTile

SEMAPHORES = 1024
"""Length of `PackedOperand.semaphores`."""


@cache
def x_layout(bits: int = 16) -> gl.NVMMASharedLayout:
    """Return the layout of shared memory for a stage of x."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


@cache
def plain_layout(rank: int) -> gl.NVMMASharedLayout:
    """Return the layout of shared memory for a stage of words or of scales."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


@dataclass(frozen=True)
class PackedOperand:
    """A packed weight [N, K] for the kernels.

    words       int32 [N/64, K/64, word_rows * 64], tiles of 64 rows and 64 columns; or E4M3 [N, K], if the
                decoder is `in_shared`
    scales      int32, as the decoder has it
    semaphores  int32 [SEMAPHORES], zero before and after every launch: partial sums of a tile that are done
    decoder     what the bytes mean, for the activations' type
    factor      fp32, by which y is multiplied before it is rounded: [1], or [M] if the decoder has
                `factor_by_row`; or None
    table       what the decoder fills its table in shared memory from; or None
    prepared    what `stream_k.launch` has prepared for launches of this weight
    """

    words: Tensor
    scales: Tensor
    semaphores: Tensor
    decoder: Decoder
    factor: Tensor | None = None
    table: Tensor | None = None
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def columns(self) -> int:
        """The number of columns K of the packed weight, rounded up to whole tiles and summed over all planes
        of the decoder.
        """
        return self.words.shape[1] * (1 if self.decoder.in_shared else 64)

    def descriptors(self, x: Tensor, tile: HopperTile) -> list[TensorDescriptor]:
        """Return the TMA descriptors of a stage: activations, words, scales."""
        if self.decoder.in_shared:
            words, words_layout = self.words, x_layout(8)
        else:
            row_tiles, k_tiles, _ = self.words.shape
            words = self.words.view(row_tiles, k_tiles * self.decoder.word_rows, 64)
            words_layout = plain_layout(3)
        scale_block = self.decoder.scale_block(tile)
        return [
            TensorDescriptor.from_tensor(x, [tile.m, tile.k_tiles * 64], x_layout(self.decoder.x_bits)),
            TensorDescriptor.from_tensor(words, self.decoder.words_block(tile), words_layout),
            TensorDescriptor.from_tensor(self.scales, scale_block, plain_layout(len(scale_block))),
        ]
