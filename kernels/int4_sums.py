"""What becomes of a tile's sums in `int4_shares.py`: sent to the tile's owner, or completed and written to y.

Not for the sums of `int4_waves.py`, where the part of K that arrives last adds them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from .int4_ptx import await_count, clear, count_one, fetch_asm, here, send_asm, store_asm


@gluon.constexpr_function
def by_eight_layout(rows):
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, 8, 16])


@gluon.jit
def by_eight(sums, BN: gl.constexpr, COLUMNS: gl.constexpr):
    """Sums [BN, COLUMNS] as a tuple of [BN, 8]; nothing moves."""
    if COLUMNS == 8:
        return (gl.convert_layout(sums, by_eight_layout(BN), assert_trivial=True),)
    else:
        low, high = gl.split(gl.permute(gl.reshape(sums, [BN, 2, COLUMNS // 2]), [0, 2, 1]))
        return by_eight(low, BN, COLUMNS // 2) + by_eight(high, BN, COLUMNS // 2)


@gluon.jit
def finish(
    sums, y, partials, arrivals, tile_n, tile_m, piece, piece_end, stages_k, M, N, index, owner, last,
    BN: gl.constexpr, BM: gl.constexpr, HALF: gl.constexpr, QUADS: gl.constexpr,
):  # fmt: skip
    """What becomes of the sums [BN, BM] of stages `piece` to `piece_end` of a tile.

    A part that is not a tile's first goes to CTA `owner`; who has the first part adds those of the CTAs up to
    `last`.

    Eight columns at a time, a number of bytes apart that the compiler knows: an address each would take the
    registers that hold loads in flight.
    """
    eights: gl.constexpr = BM // 8
    parts = by_eight(sums, BN, BM)
    n = gl.arange(0, BN, gl.SliceLayout(1, by_eight_layout(BN)))[:, None]
    m = gl.arange(0, 8, gl.SliceLayout(0, by_eight_layout(BN)))[None, :]
    # Where a thread's pairs of sums lie in scratch memory, in bytes: threads side by side.
    at = (((n >> 3) & 1) * (BN * 2) + (n >> 4) * 32 + (n & 7) * 4 + ((m >> 1) & 3)) * 8
    if piece > 0:
        gdc_wait()
        where = here(partials + index * (BN * BM)) + at
        for eight in gl.static_range(eights):
            gl.inline_asm_elementwise(
                send_asm(eight * BN * 32), "=r,=r,r,r,l,l", [parts[eight], where],
                dtype=gl.int32, is_pure=False, pack=2,
            )  # fmt: skip
        gl.thread_barrier()
        count_one(arrivals + owner)
    else:
        if piece_end < stages_k:
            await_count(arrivals + index, last - index)
            together: gl.constexpr = max(1, min(8, 128 // BM))
            for first in range(index + 1, last + 1, together):
                for i in gl.static_range(together):
                    other = first + i
                    where = here(partials + other * (BN * BM)) + at
                    wanted = (other <= last).to(gl.int32) + at * 0
                    for eight in gl.static_range(eights):
                        theirs = gl.inline_asm_elementwise(
                            fetch_asm(eight * BN * 32), "=r,=r,l,l,r,r", [where, wanted],
                            dtype=gl.float32, is_pure=False, pack=2,
                        )  # fmt: skip
                        # The sums go round: after all eights each is in its place.
                        parts = parts[1:] + (parts[0] + theirs,)  # noqa: RUF005
            gl.thread_barrier()
            clear(arrivals + index)
        gdc_wait()
        for eight in gl.static_range(eights):
            write(parts[eight], y, tile_n * BN, tile_m * BM + eight * 8, n, m, M, N, HALF, QUADS)


@gluon.jit
def write(sums, y, first_n, first_m, n, m, M, N, HALF: gl.constexpr, QUADS: gl.constexpr):
    """Sums of rows n of the weight and eight rows m of x to y."""
    if QUADS:
        # As `store_asm` leaves them: every second lane has neighbours from the lower eight of sixteen rows.
        target_n = (n & -16) + (m & 6) + (m & 2) * 3
        target_m = n & 7
        inside = (target_m < M - first_m) & (target_n < N - first_n)
        corner = here(y + (first_m.to(gl.int64) * N + first_n))
        where = corner + ((target_m * N + target_n) * 2).to(gl.int64)
        gl.inline_asm_elementwise(
            store_asm(HALF), "=r,=r,=r,=r,r,r,r,r,l,l,l,l,r,r,r,r", [sums, where, inside.to(gl.int32)],
            dtype=gl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        target_n = first_n + n
        target_m = first_m + m
        inside = (target_m < M) & (target_n < N)
        gl.store(y + (target_m.to(gl.int64) * N + target_n), sums.to(y.dtype.element_ty), mask=inside)
