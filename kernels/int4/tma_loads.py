"""How the producer warps of the INT4 kernels start copying a stage into a slot of their rings, in Gluon.

A stage is K_TILES tiles of 64 columns. The rings: words [slots, rows / 64, K_TILES * 8, 64], zeros and scales
[slots, groups, rows], x [slots, rows, K_TILES * 64]. Past the end of K zeros arrive. The two kernels wait for a
slot's bytes in ways of their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


@gluon.constexpr_function
def stage_bytes(words_ring, scale_ring, x_ring, tiles):
    """All that arrives in a slot, by the shapes of the three rings."""
    return words_ring[1] * tiles * 2048 + scale_ring[1] * scale_ring[2] * 4 + x_ring[1] * tiles * 128


@gluon.jit
def load_weights(
    words_desc, scale_desc, words_ring, scale_ring, slot, bar, stage, tile_n, pred,
    K_TILES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    words_from = [tile_n * words_ring.shape[1], stage * (K_TILES * 8), 0]
    tma.async_copy_global_to_shared(words_desc, words_from, bar, words_ring.index(slot), pred=pred)
    scales_from = [(stage * (K_TILES * 64)) // GROUP, tile_n * scale_ring.shape[2]]
    tma.async_copy_global_to_shared(scale_desc, scales_from, bar, scale_ring.index(slot), pred=pred)


@gluon.jit
def load_activations(x_desc, x_ring, slot, bar, stage, tile_m, pred, K_TILES: gl.constexpr):
    x_from = [tile_m * x_ring.shape[1], stage * (K_TILES * 64)]
    tma.async_copy_global_to_shared(x_desc, x_from, bar, x_ring.index(slot), pred=pred)
