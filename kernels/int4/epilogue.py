"""What becomes of a tile's sums in `stream_k.py`: sent to the tile's owner, or completed and written to y.

A multiprocessor stores 22 to 29 bytes a cycle, in whatever way, so from 128 rows of x on sums travel in fp16,
times a power of two for each thread: at most 2^-11 of a sum is lost, and of what is under 2^-29 of the
thread's greatest more. y loses up to 2^-8 in bf16, 2^-11 in fp16.

Not for the sums of `invariant.py`, where the part of K that arrives last adds them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from .ptx import (
    acquire_wait,
    clear,
    here,
    load_fp16_asm,
    load_partials_asm,
    load_scale_asm,
    loads_constraints,
    max_abs_asm,
    release_increment,
    store_fp16_asm,
    store_partials_asm,
    store_scale_asm,
    store_y_asm,
)

FP16_FROM_ROWS = gl.constexpr(128)
"""Rows of x in a tile from which on sums travel in fp16."""


@gluon.constexpr_function
def fragment_layout(rows):
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, 8, 16])


@gluon.jit
def split_accumulator(sums, BN: gl.constexpr, COLUMNS: gl.constexpr):
    """Sums [BN, COLUMNS] as a tuple of [BN, 8]; nothing moves."""
    if COLUMNS == 8:
        return (gl.convert_layout(sums, fragment_layout(BN), assert_trivial=True),)
    else:
        low, high = gl.split(gl.permute(gl.reshape(sums, [BN, 2, COLUMNS // 2]), [0, 2, 1]))
        return split_accumulator(low, BN, COLUMNS // 2) + split_accumulator(high, BN, COLUMNS // 2)


@gluon.jit
def partial_offsets(BN: gl.constexpr):
    """Where a thread's four sums of an eight lie in scratch memory, in bytes: threads side by side."""
    n = gl.arange(0, BN, gl.SliceLayout(1, fragment_layout(BN)))[:, None]
    m = gl.arange(0, 8, gl.SliceLayout(0, fragment_layout(BN)))[None, :]
    return ((n >> 4) * 32 + (n & 7) * 4 + ((m >> 1) & 3)) * 16


@gluon.constexpr_function
def partial_floats(rows, columns):
    """Scratch memory for the sums of a CTA, in fp32 numbers; from `FP16_FROM_ROWS` rows of x on fp16 and scales."""
    return rows * columns // 2 + rows * 2 if columns >= FP16_FROM_ROWS else rows * columns


@gluon.jit
def send(parts, partials, semaphores, at, index, owner, BN: gl.constexpr, BM: gl.constexpr):
    """Sums [BN, BM] as eights to scratch memory, counted for the CTA that owns the tile.

    A number of bytes apart that the compiler knows: an address each would take the registers that hold loads
    in flight.
    """
    gdc_wait()
    ours = here(partials + index * partial_floats(BN, BM))
    if BM >= FP16_FROM_ROWS:
        send_fp16(parts, ours, at, BN, BM)
    else:
        where = ours + at
        for eight in gl.static_range(BM // 8):
            gl.inline_asm_elementwise(
                store_partials_asm(eight * BN * 32), "=r,=r,=r,=r,r,r,r,r,l,l,l,l", [parts[eight], where],
                dtype=gl.int32, is_pure=False, pack=4,
            )  # fmt: skip
    gl.thread_barrier()
    release_increment(semaphores + owner, "tid.x")


@gluon.jit
def send_fp16(parts, ours, at, BN: gl.constexpr, BM: gl.constexpr):
    """Sums in fp16, times the power of two that brings a thread's greatest to 2^14 .. 2^15.

    With an infinite one among them the thread's others go as they are.
    """
    greatest = gl.zeros_like(parts[0])
    for eight in gl.static_range(BM // 8):
        greatest = gl.inline_asm_elementwise(
            max_abs_asm(), "=f,=f,=f,=f,f,f,f,f,f,f,f,f", [parts[eight], greatest],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    exponent = greatest.to(gl.int32, bitcast=True) >> 23
    shift = gl.where(exponent == 255, 127, gl.minimum(268 - exponent, 253)) << 23
    scale = shift.to(gl.float32, bitcast=True)
    inverse = ((254 << 23) - shift).to(gl.float32, bitcast=True)
    where = ours + at
    for pair in gl.static_range(BM // 16):
        gl.inline_asm_elementwise(
            store_fp16_asm(pair * BN * 32), "=r,=r,=r,=r,f,f,f,f,f,f,f,f,f,f,f,f,l,l,l,l",
            [parts[2 * pair], parts[2 * pair + 1], scale, where], dtype=gl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    gl.inline_asm_elementwise(
        store_scale_asm(BN * BM * 2), "=r,=r,=r,=r,f,f,f,f,l,l,l,l", [inverse, ours + at // 4],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def add(parts, partials, semaphores, at, index, last, BN: gl.constexpr, BM: gl.constexpr):
    """The sums, as eights, and those of the CTAs up to `last`."""
    acquire_wait(semaphores + index, last - index)
    if BM >= FP16_FROM_ROWS:
        for other in range(index + 1, last + 1):
            theirs = here(partials + other * partial_floats(BN, BM))
            parts = add_fp16(parts, theirs + at // 4, theirs + at, BN * BM * 2, False, BN, BM)
    else:
        together: gl.constexpr = max(1, min(8, 128 // BM))
        for first in range(index + 1, last + 1, together):
            for i in gl.static_range(together):
                other = first + i
                where = here(partials + other * partial_floats(BN, BM)) + at
                wanted = (other <= last).to(gl.int32) + at * 0
                for eight in gl.static_range(BM // 8):
                    theirs = gl.inline_asm_elementwise(
                        load_partials_asm(eight * BN * 32), "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [where, wanted],
                        dtype=gl.float32, is_pure=False, pack=4,
                    )  # fmt: skip
                    # The sums go round: after all eights each is in its place.
                    parts = parts[1:] + (parts[0] + theirs,)  # noqa: RUF005
    gl.thread_barrier()
    clear(semaphores + index, "tid.x")
    return parts


@gluon.jit
def add_fp16(
    parts, scale_at, where, OFFSET: gl.constexpr, SHARED: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr
):
    """The sums, as eights, and those that `send_fp16` has sent, in scratch or since in shared memory."""
    inverse = gl.inline_asm_elementwise(
        load_scale_asm(OFFSET, SHARED), loads_constraints(4, SHARED), [scale_at], dtype=gl.float32, is_pure=False,
        pack=4,
    )  # fmt: skip
    for pair in gl.static_range(BM // 16):
        one, two = gl.inline_asm_elementwise(
            load_fp16_asm(pair * BN * 32, SHARED), loads_constraints(8, SHARED), [where],
            dtype=(gl.float32, gl.float32), is_pure=False, pack=4,
        )  # fmt: skip
        # The sums go round: after all pairs each is in its place.
        parts = parts[2:] + (parts[0] + one * inverse, parts[1] + two * inverse)  # noqa: RUF005
    return parts


@gluon.jit
def write(
    parts, y, tile_n, tile_m, M, N, BN: gl.constexpr, BM: gl.constexpr, HALF: gl.constexpr,
    VECTOR_STORE: gl.constexpr,
):  # fmt: skip
    """Sums as eights to y, where that has rows and columns for them."""
    gdc_wait()
    corner = here(y + (tile_m.to(gl.int64) * BM * N + tile_n * BN))
    n = gl.arange(0, BN, gl.SliceLayout(1, fragment_layout(BN)))[:, None]
    m = gl.arange(0, 8, gl.SliceLayout(0, fragment_layout(BN)))[None, :]
    rows = M - tile_m * BM
    columns = N - tile_n * BN
    if VECTOR_STORE:
        # As `store_y_asm` leaves them: every second lane has neighbours from the lower eight of sixteen rows.
        target_n = (n & -16) + (m & 6) + (m & 2) * 3
        target_m = n & 7
        where = corner + ((target_m * N + target_n) * 2).to(gl.int64)
        target_m = gl.where(target_n < columns, target_m, rows)
        for eight in gl.static_range(BM // 8):
            inside = (target_m < rows - eight * 8).to(gl.int32)
            gl.inline_asm_elementwise(
                store_y_asm(HALF), "=r,=r,=r,=r,r,r,r,r,l,l,l,l,r,r,r,r", [parts[eight], where, inside],
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
