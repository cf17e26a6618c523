"""Heads and tails in `shares.py`: one CTA has the first part of each tile, others what is left of a few.

    CTA 0 |---- tile 0 ----|          two tiles by three CTAs
    CTA 1 |---- tile 1 ----|
    CTA 2   tile 0 |--| tile 1 |--|   sends both, before the others have come to their end

So those who complete tiles find the other sums there, and their producer warp copies them into the ring
before they are wanted; those who send have their producer wait until sums are seen everywhere. For tiles of
64 rows of the weight, whose sums in fp16 take no more than the activations of a stage.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .ptx import (
    arrive_at,
    await_count,
    clear,
    copy_asm,
    count_one,
    here,
    sync_warp,
    wait_for,
)
from .sums import add_halves, numbers_of, send_halves

MOST_TAILS = gl.constexpr(8)
"""Tails of a CTA, which has a barrier for each."""


@gluon.jit
def send_tail(parts, partials, at, tile, barrier, BN: gl.constexpr, BM: gl.constexpr):
    """Sums [BN, BM] as eights to scratch memory; `count_tails` does the rest.

    Activations have come, so the kernel before this one has ended, and reads nothing there any more.
    """
    send_halves(parts, here(partials + tile * numbers_of(BN, BM)), at, BN, BM)
    sync_warp()
    arrive_at(barrier, tile >= 0)


@gluon.jit
def count_tails(arrivals, tile, number, SENT: gl.constexpr):
    """For the producer warp: so many tiles' tails are counted as they are sent."""
    for i in range(number):
        wait_for(SENT + i * 8, 0)
        count_one(arrivals + tile + i, "laneid")


@gluon.jit
def fetch_tail(
    partials, arrivals, tile, stage, BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    TILES: gl.constexpr, WORDS: gl.constexpr, READY: gl.constexpr, FREE: gl.constexpr,
):  # fmt: skip
    """For the producer warp: a tile's other sums into the slot behind so many stages, scales to its words."""
    await_count(arrivals + tile, 1)
    clear(arrivals + tile, "laneid")
    turn = stage // STAGES
    slot = stage - turn * STAGES
    if turn > 0:
        wait_for(FREE + slot * 8, (turn - 1) & 1)
    theirs = here(partials + tile * numbers_of(BN, BM))
    gl.inline_asm_elementwise(
        copy_asm(BN * BM * 2, BN * 8, READY, WORDS), "=r,l,l,r,r,r",
        [theirs, theirs + BN * BM * 2, slot * (BM * TILES * 128), slot * (BN * TILES * 32), slot * 8],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_tail(
    parts, slot, phase, at, BN: gl.constexpr, BM: gl.constexpr, TILES: gl.constexpr, WORDS: gl.constexpr,
    READY: gl.constexpr,
):  # fmt: skip
    """The sums, as eights, and those that `fetch_tail` brings."""
    wait_for(READY + slot * 8, phase)
    scale_at = at // 4 + slot * (BN * TILES * 32)
    return add_halves(parts, scale_at, at + slot * (BM * TILES * 128), WORDS, True, BN, BM)
