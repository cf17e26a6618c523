"""TMA loads of one stage of the shared-memory ring, for the kernels' producer warps.

A stage is K_TILES tiles of 64 columns of K:

    words   int32 [STAGES, BN / 64, K_TILES * word_rows, 64]
    scales  int32 [STAGES, ...]                                 as the decoder has it
    x       bf16, fp16 or E4M3 [STAGES, BM, K_TILES * 64]       128-byte swizzle

TMA fills in zeros past the end of K, M and N. The stream-K kernel and the batch-invariant kernel each arm the
full mbarrier in their own way.
"""

import math

from ..triton_imports import aggregate, gl, gluon, tensor_descriptor, tma_load
from .traits import Slots


@aggregate
class Ring:
    """TMA descriptors, the ring that they fill, and for each stage an mbarrier that counts the bytes."""

    x_desc: tensor_descriptor
    words_desc: tensor_descriptor
    scale_desc: tensor_descriptor
    words: gl.shared_memory_descriptor | Slots
    scales: gl.shared_memory_descriptor | Slots
    x: gl.shared_memory_descriptor | Slots
    full: gl.shared_memory_descriptor | Slots

    @gluon.constexpr_function
    def __init__(self, x_desc, words_desc, scale_desc, words, scales, x, full):
        self.x_desc = x_desc
        self.words_desc = words_desc
        self.scale_desc = scale_desc
        self.words = words
        self.scales = scales
        self.x = x
        self.full = full

    @gluon.jit
    def load_weights(self, slot, k_stage, tile_n, pred, t):
        """Start loading the words and scales of stage `k_stage` of K into a slot."""
        block: gl.constexpr = self.words_desc.block_shape
        bar = self.full.index(slot)
        if t.IN_SHARED:
            words_from = [tile_n * block[0], k_stage * block[1]]
        else:
            words_from = [tile_n * block[0], k_stage * block[1], 0]
        tma_load(self.words_desc, words_from, bar, self.words.index(slot), pred=pred)
        scales_from = t.DECODER.scale_corner(k_stage, tile_n, t)
        tma_load(self.scale_desc, scales_from, bar, self.scales.index(slot), pred=pred)

    @gluon.jit
    def load_activations(self, slot, k_stage, tile_m, pred, t):
        """Start loading the activations of stage `k_stage` of K into a slot."""
        row = tile_m * t.BM
        column = k_stage * (t.K_TILES * 64)
        if t.PLANES == 2:
            # The weight has its planes one behind the other along K, and x is there once.
            column = gl.where(column < self.x_desc.shape[1], column, column - self.x_desc.shape[1])
        bar = self.full.index(slot + t.X_BARRIER)
        tma_load(self.x_desc, [row, column], bar, self.x.index(slot), pred=pred)


@gluon.constexpr_function
def activation_bytes(x_block, x_bits=16):
    """Return the bytes of x that arrive in a slot."""
    return x_bits // 8 * math.prod(x_block)


@gluon.constexpr_function
def stage_bytes(words_block, scale_block, x_block, x_bits=16, word_bytes=4):
    """Return all bytes that arrive in a slot."""
    return (
        word_bytes * math.prod(words_block) + 4 * math.prod(scale_block) + activation_bytes(x_block, x_bits)
    )


@gluon.constexpr_function
def full_bytes(words_block, scale_block, x_block, x_apart, x_bits, word_bytes):
    """Return the bytes that a full stage's mbarrier counts: x's too, unless x arrives at a separate one."""
    apart = activation_bytes(x_block, x_bits) if x_apart else 0
    return stage_bytes(words_block, scale_block, x_block, x_bits, word_bytes) - apart


@gluon.constexpr_function
def ring_shape(stages, block_shape):
    """A ring of blocks."""
    return [stages, *block_shape]
