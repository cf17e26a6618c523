"""Decode attention over KVarN pages, split-KV, with what is in 16 bits read in the same pass; Triton.

    turned_q     fp16 [B, H, D]        rotated (`turn.py`); one token a request
    pages        KVarNTile of [P, H_kv] tiles, held as in `turn.py`
    block_table  int32 [B, pages]      lengths int32 [B], the current token included; 0 gives a row of zeros
    out          [B, H, D]             rotated back

A program is one warp, or two for heads of 256 channels, and takes one (request, kv head, run of splits)
with all the query heads of the group. Splits, workspace and merge are those of `decode_attention.py`:
boundaries follow from the request's context alone. Of a context, page 0 and the page of the current token
are read from `held`, all others as codes.

Bytes for one request of L tokens: L * H_kv * (D * (4 + value_bits) / 8 + 6 * (D + G) / G), and D * 4 for
each of the tokens in 16 bits.
"""

from torch import Tensor

from ..decode_attention import (
    LOG2_E,
    DecodeWorkspace,
    _split_tokens,
    compute_capability,
    merge_splits,
)
from ..triton_imports import tl, triton
from .kvarn import KVarNTile
from .kvarn_page import attend_page
from .softmax import attend_plain, load_columns, load_slices, programs_of_splits, store_columns
from .turn import held_at

UNIT = 128
"""Tokens of the shortest split; a multiple of every page."""
PLAIN_BLOCK = 32
"""Tokens in 16 bits at a time."""
STAGES = 2
"""Codes and scales of a page are in flight while the page before is multiplied."""


@triton.jit(do_not_specialize=["table_stride", "max_splits"])
def _attend_splits(
    q_ptr, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, held_ptr,
    block_table_ptr, lengths_ptr, rows_ptr, partial_ptr, lse_ptr,
    scale_log2, softcap, table_stride, max_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    VALUE_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Partial softmax sums of every `num_programs(0)`-th split."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = DIM // 4
    request = tl.program_id(2)
    kv_head = tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    row = tl.load(rows_ptr + request)
    table_ptr = block_table_ptr + request * table_stride
    group = tl.arange(0, GROUP)
    is_head = group < HEADS // KV_HEADS
    head = request * HEADS + kv_head * (HEADS // KV_HEADS) + group
    channel = tl.arange(0, WIDTH)
    q0, q1, q2, q3 = load_columns(q_ptr, head.to(tl.int64) * DIM, is_head, channel, WIDTH)
    in_block = tl.arange(0, PLAIN_BLOCK)
    own_page = (length - 1) // GROUP_SIZE
    split_tokens = _split_tokens(length, SPLIT, UNIT)
    split = tl.program_id(0)
    while split * split_tokens < length:
        start = split * split_tokens
        end = tl.minimum(start + split_tokens, length)
        largest = tl.full([GROUP], -float("inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        acc0 = tl.zeros([WIDTH, GROUP], tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        page = tl.maximum(start // GROUP_SIZE, 1)
        end_page = tl.minimum(tl.cdiv(end, GROUP_SIZE), own_page)
        tile = tl.load(table_ptr + page, mask=page < end_page, other=0).to(tl.int64) * KV_HEADS + kv_head
        for index in tl.range(page, end_page, num_stages=STAGES):
            this_tile = tile
            # A page ahead, so that no load of codes waits for the table.
            tile = tl.load(table_ptr + index + 1, mask=index + 1 < end_page, other=0).to(tl.int64) * KV_HEADS
            tile += kv_head
            acc0, acc1, acc2, acc3, largest, total = attend_page(
                q0, q1, q2, q3, acc0, acc1, acc2, acc3, largest, total,
                this_tile, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, is_head, scale_log2, softcap,
                VALUE_BITS, GROUP_SIZE, DIM, SOFTCAP, False, ASM,
            )  # fmt: skip
        # In 16 bits: page 0 as tokens 0 .. G, the page of the current token as tokens G .. 2G.
        first = tl.where(start == 0, 0, GROUP_SIZE)
        last = tl.where(own_page == 0, length, GROUP_SIZE)
        if (own_page > 0) & (end == length):
            last = GROUP_SIZE + length - own_page * GROUP_SIZE
        for block in range(first, last, PLAIN_BLOCK):
            token = block + in_block
            is_token = token < last
            at = held_at(row, token, 0, kv_head, KV_HEADS, DIM, GROUP_SIZE)
            k0, k1, k2, k3 = load_slices(held_ptr, at, is_token, WIDTH)
            at = held_at(row, token, 1, kv_head, KV_HEADS, DIM, GROUP_SIZE)
            v0, v1, v2, v3 = load_slices(held_ptr, at, is_token, WIDTH)
            acc0, acc1, acc2, acc3, largest, total = attend_plain(
                q0, q1, q2, q3, acc0, acc1, acc2, acc3, largest, total, k0, k1, k2, k3, v0, v1, v2, v3,
                is_token[:, None], scale_log2, softcap, SOFTCAP,
            )  # fmt: skip
        at = head * max_splits + split
        tl.store(lse_ptr + at, largest + tl.log2(total), mask=is_head)
        by = (1.0 / total)[None, :]
        store_columns(
            partial_ptr,
            at.to(tl.int64) * DIM,
            is_head,
            acc0 * by,
            acc1 * by,
            acc2 * by,
            acc3 * by,
            channel,
            WIDTH,
        )
        split += tl.num_programs(0)


def kvarn_decode(
    turned_q: Tensor,
    pages: KVarNTile,
    held: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    request_rows: Tensor,
    workspace: DecodeWorkspace,
    *,
    value_bits: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor,
) -> None:
    """Write `out`; arguments as in the file's docstring, options as in `decode_attention.py`."""
    batch, heads, dim = turned_q.shape
    kv_heads, group_size = held.shape[3:5]
    splits = programs_of_splits(workspace.max_splits, batch * kv_heads)
    capability = compute_capability(turned_q.device)
    _attend_splits[(splits, kv_heads, batch)](
        turned_q, *vars(pages).values(), held, block_table, lengths, request_rows,
        workspace.partial, workspace.lse,
        scale * LOG2_E, softcap * LOG2_E, block_table.stride(0), workspace.max_splits,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=max(8, triton.next_power_of_2(heads // kv_heads)), DIM=dim,
        VALUE_BITS=value_bits, GROUP_SIZE=group_size, SPLIT=workspace.split_tokens, UNIT=UNIT,
        PLAIN_BLOCK=min(PLAIN_BLOCK, group_size), SOFTCAP=softcap > 0, ASM=capability >= (8, 0),
        PDL=capability >= (9, 0), STAGES=STAGES, num_warps=1 if dim <= 128 else 2, num_stages=STAGES,
    )  # fmt: skip
    merge_splits(workspace, lengths, sinks, out, block=UNIT, is_rotated=True)
