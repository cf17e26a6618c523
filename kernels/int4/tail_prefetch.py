"""Heads and tails in `stream_k.py`: one CTA has the first part of each tile, others what is left of a few.

    CTA 0 |---- tile 0 ----|          two tiles by three CTAs
    CTA 1 |---- tile 1 ----|
    CTA 2   tile 0 |--| tile 1 |--|   sends both, before the others have come to their end

So those who complete tiles find the other sums there, and their producer warp copies them into the ring
before they are wanted; those who send have their producer wait until sums are seen everywhere. For tiles of
64 rows of the weight, whose sums in fp16 take no more than the activations of a stage.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .epilogue import add_fp16, partial_floats, send_fp16
from .ptx import (
    acquire_wait,
    bulk_copy_asm,
    clear,
    here,
    mbarrier_arrive,
    mbarrier_wait,
    release_increment,
    sync_warp,
)

MAX_TAILS = gl.constexpr(8)
"""Tails of a CTA, which has a barrier for each."""


@gluon.jit
def send_tail(parts, partials, at, tile, barrier, BN: gl.constexpr, BM: gl.constexpr):
    """Sums [BN, BM] as eights to scratch memory; `signal_tails` does the rest.

    Activations have come, so the kernel before this one has ended, and reads nothing there any more.
    """
    send_fp16(parts, here(partials + tile * partial_floats(BN, BM)), at, BN, BM)
    sync_warp()
    mbarrier_arrive(barrier, tile >= 0)


@gluon.jit
def signal_tails(semaphores, tile, number, SENT: gl.constexpr):
    """For the producer warp: so many tiles' tails are counted as they are sent."""
    for i in range(number):
        mbarrier_wait(SENT + i * 8, 0)
        release_increment(semaphores + tile + i, "laneid")


@gluon.jit
def prefetch_tail(
    partials, semaphores, tile, stage, BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    K_TILES: gl.constexpr, WORDS: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr,
):  # fmt: skip
    """For the producer warp: a tile's other sums into the slot behind so many stages, scales to its words."""
    acquire_wait(semaphores + tile, 1)
    clear(semaphores + tile, "laneid")
    turn = stage // STAGES
    slot = stage - turn * STAGES
    if turn > 0:
        mbarrier_wait(EMPTY + slot * 8, (turn - 1) & 1)
    theirs = here(partials + tile * partial_floats(BN, BM))
    gl.inline_asm_elementwise(
        bulk_copy_asm(BN * BM * 2, BN * 8, FULL, WORDS), "=r,l,l,r,r,r",
        [theirs, theirs + BN * BM * 2, slot * (BM * K_TILES * 128), slot * (BN * K_TILES * 32), slot * 8],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_tail(
    parts, slot, phase, at, BN: gl.constexpr, BM: gl.constexpr, K_TILES: gl.constexpr, WORDS: gl.constexpr,
    FULL: gl.constexpr,
):  # fmt: skip
    """The sums, as eights, and those that `prefetch_tail` brings."""
    mbarrier_wait(FULL + slot * 8, phase)
    scale_at = at // 4 + slot * (BN * K_TILES * 32)
    return add_fp16(parts, scale_at, at + slot * (BM * K_TILES * 128), WORDS, True, BN, BM)
