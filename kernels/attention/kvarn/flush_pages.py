"""Writes the KVarN pages that are due, on GPUs of compute capability 8.0 and more; Gluon.

`flush.py` decides when a page is due and contains the writer for older GPUs; `flush_tile.py` codes one tile.
"""

from ...triton_imports import gl, gluon
from .flush_rotate import rotate_rows, rows_layout
from .flush_tile import accumulator, write_tile

REGISTERS = 128
"""Two programs of eight warps share a multiprocessor's."""


@gluon.constexpr_function
def _tile_layout(dim: int):
    return gl.SwizzledSharedLayout(8, max(1, 64 // dim), min(8, dim // 8), [1, 0])


@gluon.jit
def _scratch(GROUP_SIZE: gl.constexpr, DIM: gl.constexpr):
    """Shared memory that `write_tile` uses."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    LONGEST: gl.constexpr = max(GROUP_SIZE, DIM)
    return (
        gl.allocate_shared_memory(gl.float16, [GROUP_SIZE, DIM], _tile_layout(DIM)),
        gl.allocate_shared_memory(gl.float16, [GROUP_SIZE, 8], WEIGHTS),
        gl.allocate_shared_memory(gl.float16, [DIM, 8], WEIGHTS),
        gl.allocate_shared_memory(gl.float32, [LONGEST], PLAIN),
        gl.allocate_shared_memory(gl.float32, [LONGEST], PLAIN),
    )


@gluon.jit
def _write(
    x, at, side, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, scratch,
    VALUE_BITS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Load and write one tile: keys if the side is 0, else values; not yet rotated."""
    x = rotate_rows(x)
    if side == 0:
        write_tile(x, at, words_k_ptr, channels_ptr, tokens_ptr, scratch, True, 4, MMA)
    else:
        write_tile(x, at, words_v_ptr, channels_ptr, tokens_ptr, scratch, False, VALUE_BITS, MMA)


@gluon.jit
def _held_at(row, side, head, KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, DIM: gl.constexpr):
    """Return where the page that a request is writing begins in `held`, as `held.py` describes it."""
    return (((row * 2 + 1) * 2 + side) * KV_HEADS + head) * GROUP_SIZE * DIM


@gluon.jit(do_not_specialize=["table_stride", "num_requests"])
def decoded_kernel(
    layers_ptr, held_ptr, lengths_ptr, rows_ptr, written_ptr, table_ptr, table_stride, num_requests,
    KV_HEADS: gl.constexpr, VALUE_BITS: gl.constexpr, GROUP_SIZE: gl.constexpr, DIM: gl.constexpr,
    REQUESTS: gl.constexpr,
):  # fmt: skip
    """Write the due pages of REQUESTS requests, in one layer, keys or values of one head.

    held_ptr: the `held` of any layer, since it has the same layout in all layers
    """
    MMA: gl.constexpr = accumulator(gl.num_warps())
    LOADS: gl.constexpr = rows_layout(GROUP_SIZE, DIM, gl.num_warps())
    one_of = gl.arange(0, REQUESTS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    one_of += gl.program_id(2) * REQUESTS
    position = gl.load(lengths_ptr + one_of, mask=one_of < num_requests, other=0) - 1
    due = (position % GROUP_SIZE == 0) & (position >= 2 * GROUP_SIZE)
    written = gl.load(written_ptr + gl.load(rows_ptr + one_of, mask=due, other=0), mask=due, other=-1)
    due = due & (written != position // GROUP_SIZE - 1)
    # Neighbours on one side, since a multiprocessor's instruction cache does not hold the code of both.
    head = gl.program_id(0) % KV_HEADS
    side = gl.program_id(0) // KV_HEADS
    layer = layers_ptr + gl.program_id(1) * 5
    scratch = _scratch(GROUP_SIZE, DIM)
    token = gl.arange(0, GROUP_SIZE, gl.SliceLayout(1, LOADS))[:, None]
    dim = gl.arange(0, DIM, gl.SliceLayout(0, LOADS))[None, :]
    for _ in range(gl.sum(due.to(gl.int32), axis=0)):
        request = gl.min(gl.where(due, one_of, num_requests), axis=0)
        due = due & (one_of != request)
        page = (gl.load(lengths_ptr + request) - 1) // GROUP_SIZE - 1
        at = gl.load(table_ptr + request * table_stride + page).to(gl.int64) * KV_HEADS + head
        page_ptr = gl.multiple_of(gl.load(layer + 4).to(held_ptr.dtype), 16)
        page_ptr += _held_at(gl.load(rows_ptr + request), side, head, KV_HEADS, GROUP_SIZE, DIM)
        _write(
            gl.load(page_ptr + token * DIM + dim), at, side,
            gl.multiple_of(gl.load(layer).to(gl.pointer_type(gl.int16)), 16),
            gl.multiple_of(gl.load(layer + 1).to(gl.pointer_type(gl.int16)), 16),
            gl.load(layer + 2).to(gl.pointer_type(gl.float16)),
            gl.load(layer + 3).to(gl.pointer_type(gl.float16)),
            scratch, VALUE_BITS, MMA,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_requests", "count"])
def prompts_kernel(
    key_ptr, value_ptr, positions_ptr, slots_ptr, token_rows_ptr, lengths_ptr, held_ptr,
    words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, num_requests, count, key_stride, value_stride,
    KV_HEADS: gl.constexpr, VALUE_BITS: gl.constexpr, GROUP_SIZE: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Write the pages that GROUP_SIZE prompt tokens of a step fill: keys or values of one head."""
    MMA: gl.constexpr = accumulator(gl.num_warps())
    LOADS: gl.constexpr = rows_layout(GROUP_SIZE, DIM, gl.num_warps())
    offset = gl.arange(0, GROUP_SIZE, gl.SliceLayout(1, LOADS))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, LOADS))[None, :]
    one_of = gl.program_id(1).to(gl.int64) * GROUP_SIZE + offset
    position = gl.load(positions_ptr + one_of, mask=one_of < count, other=0)
    due = (position % GROUP_SIZE == GROUP_SIZE - 1) & (position >= GROUP_SIZE)
    due = due & (gl.load(slots_ptr + one_of, mask=one_of < count, other=-1) >= 0)
    due = due & (gl.load(lengths_ptr + one_of, mask=one_of < num_requests, other=0) == 0)
    # Neighbours on one side, since a multiprocessor's instruction cache does not hold the code of both.
    head = gl.program_id(0) % KV_HEADS
    side = gl.program_id(0) // KV_HEADS
    new_ptr = key_ptr if side == 0 else value_ptr
    stride = key_stride if side == 0 else value_stride
    scratch = _scratch(GROUP_SIZE, DIM)
    for _ in range(gl.sum(due.to(gl.int32), axis=0)):
        last = gl.min(gl.where(due, one_of, count), axis=0)
        due = due & (one_of != last)
        row = gl.load(token_rows_ptr + last)
        token = last - (GROUP_SIZE - 1) + offset
        # Those before the chunk, from the page as it was kept.
        is_new = gl.load(token_rows_ptr + token, mask=token >= 0, other=-1) == row
        new = token[:, None] * stride + head * DIM + dim
        old = _held_at(row, side, head, KV_HEADS, GROUP_SIZE, DIM) + offset[:, None] * DIM + dim
        x = gl.load(new_ptr + new, mask=is_new[:, None] & (dim >= 0), other=0.0)
        x += gl.load(held_ptr + old, mask=(~is_new)[:, None] & (dim >= 0), other=0.0)
        at = gl.load(slots_ptr + last) // GROUP_SIZE * KV_HEADS + head
        _write(x, at, side, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, scratch, VALUE_BITS, MMA)


def launch(group_size: int, dim: int) -> dict[str, int]:
    """Return the number of warps in a program, and of registers for each thread."""
    return {"num_warps": 8 if group_size * dim > 64 * 64 else 4, "maxnreg": REGISTERS}
