"""What becomes of a tile's sums in `int4_shares.py`: sent to the tile's owner, or completed and written to y.

Not for the sums of `int4_invariant.py`, where the part of K that arrives last adds them.
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
    # Where a thread's four sums of an eight lie in scratch memory, in bytes: threads side by side.
    at = ((n >> 4) * 32 + (n & 7) * 4 + ((m >> 1) & 3)) * 16
    if piece > 0:
        gdc_wait()
        where = here(partials + index * (BN * BM)) + at
        for eight in gl.static_range(eights):
            gl.inline_asm_elementwise(
                send_asm(eight * BN * 32), "=r,=r,=r,=r,r,r,r,r,l,l,l,l", [parts[eight], where],
                dtype=gl.int32, is_pure=False, pack=4,
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
                            fetch_asm(eight * BN * 32), "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [where, wanted],
                            dtype=gl.float32, is_pure=False, pack=4,
                        )  # fmt: skip
                        # The sums go round: after all eights each is in its place.
                        parts = parts[1:] + (parts[0] + theirs,)  # noqa: RUF005
            gl.thread_barrier()
            clear(arrivals + index)
        gdc_wait()
        corner = here(y + (tile_m.to(gl.int64) * BM * N + tile_n * BN))
        write(parts, y, corner, n, m, M - tile_m * BM, N - tile_n * BN, N, BM, HALF, QUADS)


@gluon.jit
def write(
    parts, y, corner, n, m, rows, columns, N, BM: gl.constexpr, HALF: gl.constexpr, QUADS: gl.constexpr
):
    """Sums of rows n of the weight and m of x, eight by eight, to y, which has so many from `corner` on."""
    if QUADS:
        # As `store_asm` leaves them: every second lane has neighbours from the lower eight of sixteen rows.
        target_n = (n & -16) + (m & 6) + (m & 2) * 3
        target_m = n & 7
        where = corner + ((target_m * N + target_n) * 2).to(gl.int64)
        target_m = gl.where(target_n < columns, target_m, rows)
        for eight in gl.static_range(BM // 8):
            inside = (target_m < rows - eight * 8).to(gl.int32)
            gl.inline_asm_elementwise(
                store_asm(HALF), "=r,=r,=r,=r,r,r,r,r,l,l,l,l,r,r,r,r", [parts[eight], where, inside],
                dtype=gl.int32, is_pure=False, pack=4,
            )  # fmt: skip
            where += N.to(gl.int64) * 16
    else:
        where = (m.to(gl.int64) * N + n) * 2
        for eight in gl.static_range(BM // 8):
            value = parts[eight].to(y.dtype.element_ty)
            inside = (m < rows - eight * 8) & (n < columns)
            gl.store((corner + where).to(y.dtype, bitcast=True), value, mask=inside)
            corner = here(corner + N.to(gl.int64) * 16)
