"""The tokens that KVarN keeps uncoded: a request's first page and the page being written; Triton.

    key, value    [T, H_kv, D]             the model's own dtype; a token's heads contiguous
    positions     int64 [T]                in each token's context; slots int64 [T], -1 for padding
    token_rows    int64 [T]                the row of `held` that the token's request has
    lengths       int32 [R]                contexts of decoding requests, whose tokens come first; else 0
    held          [rows, 2, 2, H_kv, G, D] the first page and the one being written, keys and values; dtype of
                                           key and value, not rotated
    query         [R, H, D]                contiguous; turned_q fp16, the same rotated
    written       int32 [rows]             the page that the request's last chunk ended with and filled, or -1

A decoding request's token is stored before the step attends; if its context has coded pages, the same launch
rotates its query. A prompt's tokens on the first page and on the chunk's last page are stored after the step
has attended: until then the older tokens of that page are still needed.
"""

from torch import Tensor

from ...device import compute_capability
from ...hadamard import log2, rotate
from ...triton_imports import tl, triton
from ..coded.steps import is_decoding


@triton.jit
def held_at(
    row, position, side, head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Return where a token of page 0, or of the page being written, lies in `held`; side 0 is keys."""
    which = tl.where(position >= GROUP_SIZE, 1, 0)
    at = ((row * 2 + which) * 2 + side) * KV_HEADS + head
    return (at * GROUP_SIZE + position % GROUP_SIZE) * DIM


# Strides are a model's own: known to be divided by 16, they let a load take eight channels.
@triton.jit
def _append(
    query_ptr, key_ptr, value_ptr, positions_ptr, rows_ptr, lengths_ptr, held_ptr, turned_ptr,
    key_stride, value_stride,
    KV_HEADS: tl.constexpr, PER_HEAD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    LOG_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store key and value of one kv head of one of the first R tokens, if the token belongs to a decoding
    request.
    """
    if PDL:
        # Launched while the kernel ahead still runs, and before anything is read.
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM)
    # All loads at once: none waits for another.
    length = tl.load(lengths_ptr + token)
    # As a vector: `&` with a number's comparison is an integer to the interpreter, and no mask from 3.9 on.
    keep = tl.full((DIM,), 0, tl.int32) + length > 0
    row = tl.load(rows_ptr + token)
    position = tl.load(positions_ptr + token)
    key = tl.load(key_ptr + token * key_stride + head * DIM + dim)
    value = tl.load(value_ptr + token * value_stride + head * DIM + dim)
    line = tl.arange(0, GROUP)[:, None]
    of_query = ((token * KV_HEADS + head) * PER_HEAD + line) * DIM + dim[None, :]
    is_query = (tl.where(length > 2 * GROUP_SIZE, line, PER_HEAD) < PER_HEAD) & (dim >= 0)[None, :]
    query = tl.load(query_ptr + of_query, mask=is_query, other=0.0)
    tl.store(held_ptr + held_at(row, position, 0, head, KV_HEADS, DIM, GROUP_SIZE) + dim, key, mask=keep)
    tl.store(held_ptr + held_at(row, position, 1, head, KV_HEADS, DIM, GROUP_SIZE) + dim, value, mask=keep)
    if length > 2 * GROUP_SIZE:
        turned = rotate(query.to(tl.float32), GROUP, DIM, LOG_DIM)
        tl.store(turned_ptr + of_query, turned.to(tl.float16), mask=is_query)


@triton.jit(do_not_specialize=["count", "num_requests"])
def _hold(
    key_ptr, value_ptr, positions_ptr, slots_ptr, rows_ptr, lengths_ptr, held_ptr, written_ptr,
    count, num_requests, key_stride, value_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Keep TOKENS prompt tokens if they are on the first page or on the last page of their chunk."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    inside = token < count
    row = tl.load(rows_ptr + token, mask=inside, other=0)
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    next_page = token + GROUP_SIZE - position % GROUP_SIZE
    goes_on = tl.load(rows_ptr + next_page, mask=inside & (next_page < count), other=-1) == row
    of_prompt = tl.load(slots_ptr + token, mask=inside, other=-1) >= 0
    of_prompt = of_prompt & ~is_decoding(token, lengths_ptr, num_requests)
    keep = of_prompt & ~(goes_on & (position >= GROUP_SIZE))
    if tl.max(keep.to(tl.int32), axis=0) == 0:
        return
    if head == 0:
        is_last = tl.load(rows_ptr + token + 1, mask=inside & (token + 1 < count), other=-1) != row
        page = tl.where(position % GROUP_SIZE == GROUP_SIZE - 1, position // GROUP_SIZE, -1)
        tl.store(written_ptr + row, page.to(tl.int32), mask=of_prompt & is_last)
    dim = tl.arange(0, DIM)[None, :]
    mask = keep[:, None] & (dim >= 0)
    for side in tl.static_range(2):
        source = (token * (value_stride if side else key_stride))[:, None] + head * DIM + dim
        value = tl.load((value_ptr if side else key_ptr) + source, mask=mask)
        to = held_at(row, position, side, head, KV_HEADS, DIM, GROUP_SIZE)[:, None] + dim
        tl.store(held_ptr + to, value, mask=mask)


def append_held(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    token_rows: Tensor,
    lengths: Tensor,
    held: Tensor,
    turned_q: Tensor,
) -> None:
    """Keep the tokens of decoding requests, and rotate queries that will see codes."""
    count, kv_heads, dim = key.shape
    per_head = query.shape[1] // kv_heads
    pdl = compute_capability(key.device) >= (9, 0)
    _append[(min(count, len(lengths)), kv_heads)](
        query, key, value, positions, token_rows, lengths, held, turned_q, key.stride(0), value.stride(0),
        KV_HEADS=kv_heads, PER_HEAD=per_head, GROUP=triton.next_power_of_2(per_head), DIM=dim,
        LOG_DIM=log2(dim), GROUP_SIZE=held.shape[4], PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def hold(
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    slots: Tensor,
    token_rows: Tensor,
    lengths: Tensor,
    held: Tensor,
    written: Tensor,
) -> None:
    """Keep tokens of a step's prompts after the step has attended."""
    count, kv_heads, dim = key.shape
    # Few programs: most tokens of a long chunk are not kept, and a program that does nothing takes 2.6 ns.
    tokens = 32
    _hold[(triton.cdiv(count, tokens), kv_heads)](
        key, value, positions, slots, token_rows, lengths, held, written,
        count, len(lengths), key.stride(0), value.stride(0),
        KV_HEADS=kv_heads, DIM=dim, GROUP_SIZE=held.shape[4], TOKENS=tokens, num_warps=4,
    )  # fmt: skip
