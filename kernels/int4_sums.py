"""What becomes of a tile's sums in `int4_shares.py`: sent to the tile's owner, or completed and written to y.

Not for the sums of `int4_waves.py`, where the part of K that arrives last adds them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from .int4_ptx import await_count, clear, count_one, fetch_asm, here, send_asm, store_asm

UNIT_TILES = gl.constexpr(4)
"""A unit of a share in tiles of 64 columns; it is a whole number of stages."""


@gluon.jit
def holder_of(unit, share, extra):
    """The number of the CTA whose share a unit is in: the first `extra` have one more."""
    longer = extra * (share + 1)
    if unit < longer:  # noqa: SIM108  (with no more than `extra` units `share` is zero)
        who = unit // (share + 1)
    else:
        who = extra + (unit - longer) // share
    return who


@gluon.jit
def finish(
    sums, y, partials, arrivals, tile_n, tile_m, piece, piece_end, stages_k, tiles_m, M, N, index, share,
    extra, BN: gl.constexpr, BM: gl.constexpr, HALF: gl.constexpr, TILES: gl.constexpr, PAIRS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """What becomes of the sums [BN, BM] of stages `piece` to `piece_end` of a tile."""
    n = gl.arange(0, BN, gl.SliceLayout(1, MMA))[:, None]
    m = gl.arange(0, BM, gl.SliceLayout(0, MMA))[None, :]
    # Where a thread's pairs of sums lie in scratch memory: threads side by side.
    at = (((m >> 3) * 2 + ((n >> 3) & 1)) * (BN * 2) + (n >> 4) * 32 + (n & 7) * 4 + ((m >> 1) & 3)) * 2
    at = at.to(gl.int64) * 4
    everywhere = n * 0 + m * 0
    units_k = stages_k // (UNIT_TILES // TILES)
    first_unit = (tile_n * tiles_m + tile_m) * units_k
    if piece > 0:
        gdc_wait()
        gl.inline_asm_elementwise(
            send_asm(), "=r,=r,r,r,l,l,r,r",
            [sums, here(partials + index * (BN * BM)) + at, everywhere + 1],
            dtype=gl.int32, is_pure=False, pack=2,
        )  # fmt: skip
        gl.thread_barrier()
        count_one(arrivals + holder_of(first_unit, share, extra))
    else:
        if piece_end < stages_k:
            last = holder_of(first_unit + units_k - 1, share, extra)
            await_count(arrivals + index, last - index)
            together: gl.constexpr = max(1, min(8, 128 // BM))
            for first in range(index + 1, last + 1, together):
                for i in gl.static_range(together):
                    other = first + i
                    sums += gl.inline_asm_elementwise(
                        fetch_asm(), "=r,=r,l,l,r,r",
                        [here(partials + other * (BN * BM)) + at, (other <= last).to(gl.int32) + everywhere],
                        dtype=gl.float32, is_pure=False, pack=2,
                    )  # fmt: skip
            gl.thread_barrier()
            clear(arrivals + index)
        gdc_wait()
        if PAIRS:
            # As `store_asm` leaves them: row and column of a block of eight by eight exchanged.
            target_n = (n & -8) + (m & 6)
            target_m = (m & -8) + (n & 7)
            inside = (target_m < M - tile_m * BM) & (target_n < N - tile_n * BN)
            corner = here(y + ((tile_m * BM).to(gl.int64) * N + tile_n * BN))
            where = corner + ((target_m * N + target_n) * 2).to(gl.int64)
            gl.inline_asm_elementwise(
                store_asm(HALF), "=r,=r,r,r,l,l,r,r", [sums, where, inside.to(gl.int32)],
                dtype=gl.int32, is_pure=False, pack=2,
            )  # fmt: skip
        else:
            target_n = tile_n * BN + n
            target_m = tile_m * BM + m
            inside = (target_m < M) & (target_n < N)
            gl.store(y + (target_m.to(gl.int64) * N + target_n), sums.to(y.dtype.element_ty), mask=inside)
