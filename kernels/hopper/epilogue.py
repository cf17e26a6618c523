"""Epilogue of the stream-K kernel: partial sums exchanged, reduced by the tile's owner, y stored.

    accumulator [BN, BM], fp32 --+-- not the owner:  scratch memory, then semaphore release
                                 +-- owner:          semaphore acquire, + others' sums in order of K, --> y

An SM stores 22 to 29 bytes a cycle whatever the instruction (H200, November 2026), so from `FP16_ROWS` rows
of x on partial sums travel in fp16, times a power of two for each thread: the loss is at most 2^-11 of a sum,
and more only of sums under 2^-29 of the thread's greatest. Rounding y loses 2^-8 of a number in bf16, and
2^-11 in fp16.

Scratch memory is laid out like this for each CTA (or tile, with prefetched tails): a thread's sums of eight
columns are 16 bytes, threads side by side; behind fp16 sums follows an fp32 scale for each thread.

The kernel in `invariant.py` reduces in the split that ends last.
"""

from ..triton_imports import aggregate, gdc_wait, gl, gluon, thread_barrier
from .ptx import (
    load_fp16,
    load_fp32,
    load_scale,
    max_abs,
    opaque_address,
    semaphore_acquire,
    semaphore_release,
    semaphore_reset,
    store_fp16,
    store_fp32,
    store_scale,
    store_transposed,
)

FP16_ROWS = gl.constexpr(128)
"""Rows of x in a tile from which on partial sums travel in fp16."""


@aggregate
class Exchange:
    """Where a CTA's partial sums go and come from.

    partials, semaphores   scratch memory and counters, both indexed by CTA or, with TAILS, by tile
    cta                    this CTA
    owner                  the owner of this CTA's first tile; with TAILS that tile
    last_cta               the last CTA with a part of this CTA's last tile
    """

    partials: gl.tensor
    semaphores: gl.tensor
    cta: gl.tensor
    owner: gl.tensor
    last_cta: gl.tensor

    @gluon.constexpr_function
    def __init__(self, partials, semaphores, cta, owner, last_cta):
        self.partials = partials
        self.semaphores = semaphores
        self.cta = cta
        self.owner = owner
        self.last_cta = last_cta


@aggregate
class Output:
    """Store y [M, N]: the sums, multiplied by `factor` if there is one: a number, or one for each row.

    With VECTOR_STORE, rows of y are whole groups of four.
    """

    y: gl.tensor
    M: gl.tensor
    N: gl.tensor
    factor: gl.tensor | gl.constexpr
    VECTOR_STORE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, y, m, n, factor, vector_store):
        self.y = y
        self.M = m
        self.N = n
        self.factor = gl.constexpr(None) if factor is None else factor
        self.VECTOR_STORE = gl.constexpr(vector_store)


@gluon.constexpr_function
def partial_floats(rows, columns):
    """Return how many fp32 numbers of scratch memory partial sums [rows, columns] take."""
    return rows * columns // 2 + rows * 2 if columns >= FP16_ROWS else rows * columns


@gluon.constexpr_function
def fragment_layout(rows):
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, 8, 16])


@gluon.jit
def scale_rows(accumulator, output, row, t):
    """Multiply the sums of the rows of x from `row` on by their factors, which the previous kernel may have
    written.
    """
    gdc_wait()
    m = row + gl.arange(0, t.BM // t.HALVES, gl.SliceLayout(0, t.MMA))
    factor = gl.load(output.factor + m, mask=m < output.M, other=0.0, cache_modifier=".cg")
    return accumulator * gl.expand_dims(factor, 0)


@gluon.jit
def split_accumulator(accumulator, BN: gl.constexpr, COLUMNS: gl.constexpr):
    """Split an accumulator [BN, COLUMNS] into fragments [BN, 8], four values per thread; no data moves."""
    if COLUMNS == 8:
        return (gl.convert_layout(accumulator, fragment_layout(BN), assert_trivial=True),)
    else:
        low, high = gl.split(gl.permute(gl.reshape(accumulator, [BN, 2, COLUMNS // 2]), [0, 2, 1]))
        return split_accumulator(low, BN, COLUMNS // 2) + split_accumulator(high, BN, COLUMNS // 2)


@gluon.jit
def partial_offsets(BN: gl.constexpr):
    """Return the byte offset of a thread's 16 bytes among those of a fragment."""
    n = gl.arange(0, BN, gl.SliceLayout(1, fragment_layout(BN)))[:, None]
    m = gl.arange(0, 8, gl.SliceLayout(0, fragment_layout(BN)))[None, :]
    return ((n >> 4) * 32 + (n & 7) * 4 + ((m >> 1) & 3)) * 16


@gluon.jit
def send_partials(fragments, exchange, offsets, t):
    """Store partial sums, then release the owner's semaphore.

    Addresses are constant offsets from one register: separate addresses would need the registers that hold
    loads in flight.
    """
    gdc_wait()
    scratch = opaque_address(exchange.partials + exchange.cta * partial_floats(t.BN, t.BM))
    if t.BM >= FP16_ROWS:
        store_scaled_fp16(fragments, scratch, offsets, t)
    else:
        address = scratch + offsets
        for i in gl.static_range(t.BM // 8):
            store_fp32(fragments[i], address, i * t.BN * 32)
    thread_barrier()
    semaphore_release(exchange.semaphores + exchange.owner, "tid.x")


@gluon.jit
def store_scaled_fp16(fragments, scratch, offsets, t):
    """Store sums in fp16, times the power of two that brings a thread's greatest to 2^14 .. 2^15.

    If one of a thread's sums is infinite, its other sums are not scaled.
    """
    greatest = gl.zeros_like(fragments[0])
    for i in gl.static_range(t.BM // 8):
        greatest = max_abs(fragments[i], greatest)
    exponent = greatest.to(gl.int32, bitcast=True) >> 23
    shift = gl.where(exponent == 255, 127, gl.minimum(268 - exponent, 253)) << 23
    scale = shift.to(gl.float32, bitcast=True)
    inverse = ((254 << 23) - shift).to(gl.float32, bitcast=True)
    address = scratch + offsets
    for pair in gl.static_range(t.BM // 16):
        store_fp16(fragments[2 * pair], fragments[2 * pair + 1], scale, address, pair * t.BN * 32)
    store_scale(inverse, scratch + offsets // 4, t.BN * t.BM * 2)


@gluon.jit
def reduce_partials(fragments, exchange, offsets, t):
    """As a tile's owner, wait for the later CTAs that have a part of the tile, and add their sums in the
    order of K.
    """
    cta = exchange.cta
    last_cta = exchange.last_cta
    semaphore_acquire(exchange.semaphores + cta, last_cta - cta)
    if t.BM >= FP16_ROWS:
        for other in range(cta + 1, last_cta + 1):
            scratch = opaque_address(exchange.partials + other * partial_floats(t.BN, t.BM))
            fragments = add_scaled_fp16(
                fragments, scratch + offsets // 4, scratch + offsets, t.BN * t.BM * 2, False, t
            )
    else:
        # Loads of several CTAs in flight; what is past the last is zeros.
        unroll: gl.constexpr = max(1, min(8, 128 // t.BM))
        for first in range(cta + 1, last_cta + 1, unroll):
            for i in gl.static_range(unroll):
                other = first + i
                address = opaque_address(exchange.partials + other * partial_floats(t.BN, t.BM)) + offsets
                wanted = (other <= last_cta).to(gl.int32) + offsets * 0
                for j in gl.static_range(t.BM // 8):
                    sums = load_fp32(address, wanted, j * t.BN * 32)
                    # The tuple rotates: after all fragments each is in its place.
                    fragments = fragments[1:] + (fragments[0] + sums,)  # noqa: RUF005
    thread_barrier()
    semaphore_reset(exchange.semaphores + cta, "tid.x")
    return fragments


@gluon.jit
def add_scaled_fp16(fragments, scale_address, address, OFFSET: gl.constexpr, SHARED: gl.constexpr, t):
    """Add the sums that `store_scaled_fp16` has stored, from scratch memory or, if prefetched, from shared
    memory.

    OFFSET: the byte offset of the scales behind `scale_address`
    """
    inverse = load_scale(scale_address, OFFSET, SHARED)
    for pair in gl.static_range(t.BM // 16):
        low, high = load_fp16(address, pair * t.BN * 32, SHARED)
        # The tuple rotates: after all pairs each fragment is in its place.
        fragments = fragments[2:] + (fragments[0] + low * inverse, fragments[1] + high * inverse)  # noqa: RUF005
    return fragments


@gluon.jit
def store_y(fragments, output, tile_n, tile_m, t):
    """Round the sums and store them to the tile of y, only where y has rows and columns."""
    M = output.M
    N = output.N
    if output.factor is not None and not t.FACTOR_BY_ROW:
        factor = gl.load(output.factor)
        for _ in gl.static_range(t.BM // 8):
            # The tuple rotates: after all fragments each is in its place.
            fragments = fragments[1:] + (fragments[0] * factor,)  # noqa: RUF005
    gdc_wait()
    corner = opaque_address(output.y + (tile_m.to(gl.int64) * t.BM * N + tile_n * t.BN))
    n = gl.arange(0, t.BN, gl.SliceLayout(1, fragment_layout(t.BN)))[:, None]
    m = gl.arange(0, 8, gl.SliceLayout(0, fragment_layout(t.BN)))[None, :]
    rows = M - tile_m * t.BM
    columns = N - tile_n * t.BN
    if output.VECTOR_STORE:
        # As `store_transposed` leaves them: every second lane has neighbours from the lower eight of sixteen
        # rows of the weight.
        target_n = (n & -16) + (m & 6) + (m & 2) * 3
        target_m = n & 7
        address = corner + ((target_m * N + target_n) * 2).to(gl.int64)
        target_m = gl.where(target_n < columns, target_m, rows)
        for i in gl.static_range(t.BM // 8):
            inside = (target_m < rows - i * 8).to(gl.int32)
            store_transposed(fragments[i], address, inside, t.HALF)
            address += N.to(gl.int64) * 16
    else:
        offset = (m.to(gl.int64) * N + n) * 2
        for i in gl.static_range(t.BM // 8):
            value = fragments[i].to(output.y.dtype.element_ty)
            inside = (m < rows - i * 8) & (n < columns)
            gl.store((corner + offset).to(output.y.dtype, bitcast=True), value, mask=inside)
            corner = opaque_address(corner + N.to(gl.int64) * 16)
