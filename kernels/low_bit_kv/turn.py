"""Queries, keys and values rotated for KVarN, and tokens kept in 16 bits; Triton.

    query         [T, H, D]                a token's heads contiguous; key and value [T, H_kv, D] alike
    turned        fp16, the same shapes    times a Hadamard matrix
    positions     int64 [T]                in each token's context; slots int64 [T], -1 for padding
    token_rows    int64 [T]                the row of `held` that the token's request has
    lengths       int32 [R]                contexts of decoding requests, whose tokens come first; else 0
    held          fp16 [rows, 2, 2, H_kv, G, D]   the first page and the one being written, keys and values
    written       int32 [rows]             the page that the request's last chunk ended with and filled, or -1

A decoding request's token is kept at once. Of a prompt's, the ones on the first page and on the page where
the chunk ends are kept once the step has attended: until then that page may hold older tokens still needed.
"""

import torch
from torch import Tensor

from ..decode_attention import compute_capability
from ..hadamard import log2, rotate, rotate_rows, rotates_by_products
from ..triton_imports import tl, triton


@triton.jit
def held_at(
    row, position, side, head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Where a token of page 0, or of the page being written, lies in `held`; side 0 is keys."""
    which = tl.where(position >= GROUP_SIZE, 1, 0)
    at = ((row * 2 + which) * 2 + side) * KV_HEADS + head
    return (at * GROUP_SIZE + position % GROUP_SIZE) * DIM


@triton.jit
def is_decoding(token, lengths_ptr, num_requests):
    """Whether the step's `token` is a decoding request's, not a prompt's."""
    return tl.load(lengths_ptr + token, mask=token < num_requests, other=0) > 0


# Strides are a model's own: known to be divided by 16, they let a load take eight channels.
@triton.jit(do_not_specialize=["num_requests"])
def _turn(
    query_ptr, key_ptr, value_ptr, turned_q_ptr, turned_k_ptr, turned_v_ptr,
    positions_ptr, slots_ptr, rows_ptr, lengths_ptr, held_ptr,
    num_requests, query_stride, key_stride, value_stride,
    KV_HEADS: tl.constexpr, PER_HEAD: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    LOG_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's key and value of one kv head, and the PER_HEAD query heads that share them."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    line = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    is_query, is_key, is_value = line < PER_HEAD, line == PER_HEAD, line == PER_HEAD + 1
    of_query = (head * PER_HEAD + line) * DIM + dim
    of_key = head * DIM + dim + line * 0
    x = tl.load(query_ptr + token * query_stride + of_query, mask=is_query & (dim >= 0), other=0.0)
    x = x.to(tl.float32)
    x += tl.load(key_ptr + token * key_stride + of_key, mask=is_key & (dim >= 0), other=0.0).to(tl.float32)
    x += tl.load(value_ptr + token * value_stride + of_key, mask=is_value & (dim >= 0), other=0.0).to(
        tl.float32
    )
    turned = rotate(x, ROWS, DIM, LOG_DIM).to(tl.float16)
    to_key = token * KV_HEADS * DIM + of_key
    tl.store(turned_q_ptr + token * KV_HEADS * PER_HEAD * DIM + of_query, turned, mask=is_query & (dim >= 0))
    tl.store(turned_k_ptr + to_key, turned, mask=is_key & (dim >= 0))
    tl.store(turned_v_ptr + to_key, turned, mask=is_value & (dim >= 0))
    if is_decoding(token, lengths_ptr, num_requests):
        row = tl.load(rows_ptr + token)
        position = tl.load(positions_ptr + token)
        kept = held_at(row, position, line - PER_HEAD, head, KV_HEADS, DIM, GROUP_SIZE) + dim
        tl.store(held_ptr + kept, turned, mask=(is_key | is_value) & (dim >= 0))


@triton.jit(do_not_specialize=["count", "num_requests"])
def _hold(
    turned_k_ptr, turned_v_ptr, positions_ptr, slots_ptr, rows_ptr, lengths_ptr, held_ptr, written_ptr,
    count, num_requests,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of prompts, kept if they lie on the first page or on the last one of their chunk."""
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
    source = ((token * KV_HEADS + head) * DIM)[:, None] + dim
    mask = keep[:, None] & (dim >= 0)
    for side in tl.static_range(2):
        value = tl.load((turned_v_ptr if side else turned_k_ptr) + source, mask=mask)
        to = held_at(row, position, side, head, KV_HEADS, DIM, GROUP_SIZE)[:, None] + dim
        tl.store(held_ptr + to, value, mask=mask)


@triton.jit(do_not_specialize=["num_requests"])
def _turn_back(
    turned_ptr, out_ptr, lengths_ptr, num_requests,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one token's result, unless the token is a decoding request's."""
    token = tl.program_id(0).to(tl.int64)
    if is_decoding(token, lengths_ptr, num_requests):
        return
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = (token * HEADS + head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    keep = (head < HEADS)[:, None] & (at >= 0)
    x = tl.load(turned_ptr + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, rotate(x, ROWS, DIM, LOG_DIM).to(out_ptr.dtype.element_ty), mask=keep)


def turn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    slots: Tensor,
    token_rows: Tensor,
    lengths: Tensor,
    held: Tensor,
    num_decodes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All three rotated, fp16 [T, heads, D]; tokens of decoding requests are kept in `held`.

    num_decodes: of the tokens, which stand first; None where the host does not know
    """
    count, heads, dim = query.shape
    kv_heads = key.shape[1]
    turned = [torch.empty(x.shape, dtype=torch.float16, device=x.device) for x in (query, key, value)]
    if num_decodes is not None and all(map(rotates_by_products, (query, key, value))):
        for x, to in zip((query, key, value), turned, strict=True):
            rotate_rows(x[num_decodes:], to[num_decodes:])
        count = num_decodes
    if count == 0:
        return turned[0], turned[1], turned[2]
    pdl = compute_capability(query.device) >= (9, 0)
    _turn[(count, kv_heads)](
        query, key, value, *turned, positions, slots, token_rows, lengths, held,
        len(lengths), query.stride(0), key.stride(0), value.stride(0),
        KV_HEADS=kv_heads, PER_HEAD=heads // kv_heads, ROWS=triton.next_power_of_2(heads // kv_heads + 2),
        DIM=dim, LOG_DIM=log2(dim), GROUP_SIZE=held.shape[4], PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return turned[0], turned[1], turned[2]


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
    """Keep a step's prompt tokens, rotated fp16 [T, H_kv, D], once it has attended."""
    count, kv_heads, dim = key.shape
    # Few programs: most tokens of a long chunk are not kept, and a program that does nothing takes 2.6 ns.
    tokens = 32
    _hold[(triton.cdiv(count, tokens), kv_heads)](
        key, value, positions, slots, token_rows, lengths, held, written, count, len(lengths),
        KV_HEADS=kv_heads, DIM=dim, GROUP_SIZE=held.shape[4], TOKENS=tokens, num_warps=4,
    )  # fmt: skip


def turn_back(turned: Tensor, lengths: Tensor, out: Tensor, num_decodes: int | None = None) -> None:
    """Write the prompts' tokens of `turned`, [T, H, D], rotated back into `out`, of any float dtype.

    num_decodes: as in `turn`
    """
    if num_decodes is not None and rotates_by_products(turned):
        rotate_rows(turned[num_decodes:], out[num_decodes:])
        return
    count, heads, dim = turned.shape
    rows = min(triton.next_power_of_2(heads), 8)
    _turn_back[(count, triton.cdiv(heads, rows))](
        turned, out, lengths, len(lengths),
        HEADS=heads, ROWS=rows, DIM=dim, LOG_DIM=log2(dim), num_warps=4,
    )  # fmt: skip
