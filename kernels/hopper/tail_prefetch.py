"""Tail partials prefetched: stream-K in which one CTA has the head of each tile, and other CTAs the tails of
a few.

    CTA 0  |---- head of tile 0 ----|          two tiles by three CTAs
    CTA 1  |---- head of tile 1 ----|
    CTA 2    tail 0 |--| tail 1 |--|           sends both before the owners have reached their ends

An owner's producer warp loads the tail's partial sums into the ring before the owner needs them; a sender's
producer warp signals for its consumers, so that the consumers do not wait until their stores are visible.
Tiles have 64 rows of the weight: their partial sums in fp16 need no more room than a stage's activations.
"""

from ..triton_imports import gl, gluon
from .epilogue import add_scaled_fp16, partial_floats, store_scaled_fp16
from .ptx import (
    bulk_load,
    mbarrier_arrive,
    mbarrier_wait,
    opaque_address,
    semaphore_acquire,
    semaphore_release,
    semaphore_reset,
    sync_warp,
)

MAX_TAILS = gl.constexpr(8)
"""Tails of a CTA, which has an mbarrier for each."""


@gluon.jit
def send_tail(fragments, partials, offsets, tile, barrier, t):
    """As consumers, store a tail's partial sums; `signal_tails` releases the semaphore.

    The activations have arrived, so the previous kernel has ended (PDL) and no longer reads scratch memory.
    """
    scratch = opaque_address(partials + tile * partial_floats(t.BN, t.BM))
    store_scaled_fp16(fragments, scratch, offsets, t)
    sync_warp()
    mbarrier_arrive(barrier, tile >= 0)


@gluon.jit
def signal_tails(exchange, num_tails, smem):
    """As the producer warp of a CTA that computes tails, release each tile's semaphore when all warps have
    stored their sums.
    """
    for i in range(num_tails):
        mbarrier_wait(smem.SENT + i * 8, 0)
        semaphore_release(exchange.semaphores + exchange.owner + i, "laneid")


@gluon.jit
def prefetch_tail(exchange, stages, t, smem):
    """As an owner's producer warp, load the tail's sums into the slot that follows its `stages` stages.

    The sums replace the slot's activations, and their scales replace its words.
    """
    tile = exchange.owner
    semaphore_acquire(exchange.semaphores + tile, 1)
    semaphore_reset(exchange.semaphores + tile, "laneid")
    turn = stages // t.STAGES
    slot = stages - turn * t.STAGES
    if turn > 0:
        mbarrier_wait(smem.EMPTY + slot * 8, (turn - 1) & 1)
    sums = opaque_address(exchange.partials + tile * partial_floats(t.BN, t.BM))
    bulk_load(sums, sums + t.BN * t.BM * 2, slot, t.BN * t.BM * 2, t.BN * 8, t, smem)


@gluon.jit
def add_tail(fragments, slot, phase, offsets, t, smem):
    """As an owner's consumers, add the sums that `prefetch_tail` has loaded."""
    mbarrier_wait(smem.FULL + slot * 8, phase)
    scale_address = offsets // 4 + slot * smem.WORD_BYTES
    return add_scaled_fp16(
        fragments, scale_address, offsets + slot * (t.BM * t.K_TILES * 128), smem.WORDS, True, t
    )
