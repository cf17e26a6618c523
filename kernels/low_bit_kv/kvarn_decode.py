"""Decode attention over KVarN pages, split-KV; what is not coded is attended to as it came; Triton.

    query        [B, H, D]             one token a request, not rotated, contiguous; bf16, fp16 or fp32
    pages        KVarNTile of [P, H_kv] tiles
    held         [rows, 2, 2, H_kv, G, D]   query's dtype: the first page and the one being written, keys
                                       and values, as they came
    block_table  int32 [B, pages]      lengths int32 [B], the current token included; 0 gives a row of zeros
    request_rows int64 [B]             the row of `held` that each request has
    out          [B, H, D]             query's dtype

Of a context, page 0 and the page of the current token are read from `held`, all others as codes. Each of its
splits is of one kind. Coded ones are runs of whole pages: only there is the query rotated, and the result
back. Plain ones are pieces of at most PIECE tokens of a held page. Coded splits have the first numbers: they
take longest, and a program takes every n-th split. Splits follow from the request's context alone.

A program is one warp, or two for heads of 256 channels, and takes one (request, kv head, run of splits)
with all the query heads of the group. Workspace and merge are those of `decode_attention.py`.

Bytes for one request of L tokens: L * H_kv * (D * (4 + value_bits) / 8 + 6 * (D + G) / G), and D * 4 for
each of the tokens that are held.
"""

import torch
from torch import Tensor

from ..decode_attention import LOG2_E, DecodeWorkspace, compute_capability, merge_splits
from ..hadamard import _matrix, rotate_slices
from ..triton_imports import tl, triton
from .held import held_at
from .kvarn import KVarNTile
from .kvarn_page import attend_page
from .softmax import attend_plain, load_columns, load_slices, precision_of, programs_of_splits, store_columns

PIECE = tl.constexpr(64)
"""Tokens of a plain split, all of which one warp can have on their way at once."""
STAGES = 2
"""Codes and scales of a page are in flight while the page before is multiplied."""


@triton.jit
def _coded_splits(length, SPLIT: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Pages in a coded split, and splits: a page up to four pages, two up to eight, SPLIT tokens beyond."""
    pages = tl.maximum((length - 1) // GROUP_SIZE - 1, 0)
    pages_at_once = tl.where(pages <= 4, 1, tl.where(pages <= 8, 2, max(1, SPLIT // GROUP_SIZE)))
    return pages_at_once, tl.cdiv(pages, pages_at_once)


@triton.jit
def kvarn_splits(length, first_token, SPLIT: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """The first split of a context, and where its splits end, as `even_splits` says it."""
    _, coded = _coded_splits(length, SPLIT, GROUP_SIZE)
    own_page = tl.maximum(length - 1, 0) // GROUP_SIZE
    own = tl.where(own_page > 0, length - own_page * GROUP_SIZE, 0)
    piece: tl.constexpr = min(PIECE, GROUP_SIZE)
    return 0, coded + tl.cdiv(tl.minimum(length, GROUP_SIZE), piece) + tl.cdiv(own, piece)


def plain_splits(group_size: int) -> int:
    """The most that a context has beside those of codes: what its workspace needs further."""
    return 2 * triton.cdiv(group_size, PIECE.value)


@triton.jit
def _coded_split(
    q0, q1, q2, q3, table_ptr, page, end_page, kv_head,
    words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, matrix_ptr, is_head, scale_log2, softcap,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums [M] in log2, and the result of whole pages, slices [D/4, M], rotated back."""
    WIDTH: tl.constexpr = DIM // 4
    largest = tl.full([q0.shape[1]], -float("inf"), tl.float32)
    total = tl.zeros([q0.shape[1]], tl.float32)
    acc0 = tl.zeros([WIDTH, q0.shape[1]], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    tile = tl.load(table_ptr + page).to(tl.int64) * KV_HEADS + kv_head
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
    by = (1.0 / total)[None, :]
    r0, r1, r2, r3 = rotate_slices(acc0 * by, acc1 * by, acc2 * by, acc3 * by, matrix_ptr, WIDTH)
    return largest + tl.log2(total), r0, r1, r2, r3


@triton.jit
def _plain_split(
    q_ptr, at_head, is_head, held_ptr, key_at, value_at, count, scale_log2, softcap,
    PIECE: tl.constexpr, DIM: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums [M] in log2, and the result, slices [D/4, M], of `count` tokens that lie one after another."""
    WIDTH: tl.constexpr = DIM // 4
    largest = tl.full([at_head.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([at_head.shape[0]], tl.float32)
    acc0 = tl.zeros([WIDTH, at_head.shape[0]], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    # One turn. As a loop, since keys then go to shared memory while values are on their way to registers.
    for first in tl.range(0, count, PIECE, num_stages=2):
        token = first + tl.arange(0, PIECE)
        is_token = token < count
        # `first` is 0; without it queries would be waited for before the loop.
        q0, q1, q2, q3 = load_columns(q_ptr, at_head + first, is_head, tl.arange(0, WIDTH), WIDTH)
        k0, k1, k2, k3 = load_slices(held_ptr, key_at + token * DIM, is_token, WIDTH)
        v0, v1, v2, v3 = load_slices(held_ptr, value_at + token * DIM, is_token, WIDTH)
        acc0, acc1, acc2, acc3, largest, total = attend_plain(
            q0, q1, q2, q3, acc0, acc1, acc2, acc3, largest, total, k0, k1, k2, k3, v0, v1, v2, v3,
            is_token[:, None], scale_log2, softcap, SOFTCAP, PRECISION,
        )  # fmt: skip
    by = (1.0 / total)[None, :]
    return largest + tl.log2(total), acc0 * by, acc1 * by, acc2 * by, acc3 * by


@triton.jit(do_not_specialize=["table_stride", "max_splits"])
def _attend_splits(
    q_ptr, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, held_ptr, matrix_ptr,
    block_table_ptr, lengths_ptr, rows_ptr, partial_ptr, lse_ptr, out_ptr,
    scale_log2, softcap, table_stride, max_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    VALUE_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, SPLIT: tl.constexpr, PIECE: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial softmax sums of every `num_programs(0)`-th split; of an only one, the result."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = DIM // 4
    request = tl.program_id(2)
    kv_head = tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    group = tl.arange(0, GROUP)
    is_head = group < HEADS // KV_HEADS
    head = request * HEADS + kv_head * (HEADS // KV_HEADS) + group
    pages_at_once, coded = _coded_splits(length, SPLIT, GROUP_SIZE)
    split = tl.program_id(0)

    if split < coded:
        end_page = (length - 1) // GROUP_SIZE
        table_ptr = block_table_ptr + request * table_stride
        channel = tl.arange(0, WIDTH)
        q0, q1, q2, q3 = load_columns(q_ptr, head.to(tl.int64) * DIM, is_head, channel, WIDTH)
        q0, q1, q2, q3 = rotate_slices(q0, q1, q2, q3, matrix_ptr, WIDTH)
        # By way of memory, where a result of this program is to be: what is loaded, Triton lays out as the
        # pages' products take it, once; products' results it would lay out anew for each page.
        scratch_ptr = partial_ptr.to(tl.pointer_type(tl.float16))
        scratch = (head * max_splits + split).to(tl.int64) * 2 * DIM
        store_columns(scratch_ptr, scratch, is_head, q0, q1, q2, q3, channel, WIDTH)
        tl.debug_barrier()
        q0, q1, q2, q3 = load_columns(scratch_ptr, scratch, is_head, channel, WIDTH)
        while split < coded:
            page = 1 + split * pages_at_once
            lse, r0, r1, r2, r3 = _coded_split(
                q0, q1, q2, q3, table_ptr, page, tl.minimum(page + pages_at_once, end_page), kv_head,
                words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, matrix_ptr, is_head, scale_log2, softcap,
                KV_HEADS, DIM, VALUE_BITS, GROUP_SIZE, SOFTCAP, ASM, STAGES,
            )  # fmt: skip
            at = head * max_splits + split
            tl.store(lse_ptr + at, lse, mask=is_head)
            store_columns(partial_ptr, at.to(tl.int64) * DIM, is_head, r0, r1, r2, r3, channel, WIDTH)
            split += tl.num_programs(0)

    # Anew, so that nothing of it takes a register before.
    length = tl.load(lengths_ptr + request)
    _, coded = _coded_splits(length, SPLIT, GROUP_SIZE)
    _, end = kvarn_splits(length, 0, SPLIT, GROUP_SIZE)
    row = tl.load(rows_ptr + request)
    channel = tl.arange(0, WIDTH)
    at_head = head.to(tl.int64) * DIM
    first_pieces = tl.cdiv(tl.minimum(length, GROUP_SIZE), PIECE)
    while split < end:
        piece = split - coded
        is_first = piece < first_pieces
        page_start = tl.where(is_first, 0, (length - 1) // GROUP_SIZE * GROUP_SIZE)
        start = page_start + tl.where(is_first, piece, piece - first_pieces) * PIECE
        count = tl.minimum(tl.where(is_first, tl.minimum(length, GROUP_SIZE), length) - start, PIECE)
        key_at = held_at(row, start, 0, kv_head, KV_HEADS, DIM, GROUP_SIZE)
        value_at = held_at(row, start, 1, kv_head, KV_HEADS, DIM, GROUP_SIZE)
        lse, r0, r1, r2, r3 = _plain_split(
            q_ptr, at_head, is_head, held_ptr, key_at, value_at, count, scale_log2, softcap,
            PIECE, DIM, SOFTCAP, PRECISION,
        )  # fmt: skip
        if (end == 1) & (not SINKS):
            store_columns(out_ptr, at_head, is_head, r0, r1, r2, r3, channel, WIDTH)
        else:
            at = head * max_splits + split
            tl.store(lse_ptr + at, lse, mask=is_head)
            store_columns(partial_ptr, at.to(tl.int64) * DIM, is_head, r0, r1, r2, r3, channel, WIDTH)
        split += tl.num_programs(0)


def kvarn_decode(
    query: Tensor,
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
    """Write `out`; arguments as in the file's docstring, options as in `decode_attention.py`.

    The workspace has `plain_splits` further splits.
    """
    batch, heads, dim = query.shape
    kv_heads, group_size = held.shape[3:5]
    splits = programs_of_splits(workspace.max_splits, batch * kv_heads)
    capability = compute_capability(query.device)
    _attend_splits[(splits, kv_heads, batch)](
        query, *vars(pages).values(), held, _matrix(dim // 4, query.device, torch.float16),
        block_table, lengths, request_rows, workspace.partial, workspace.lse, out,
        scale * LOG2_E, softcap * LOG2_E, block_table.stride(0), workspace.max_splits,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=max(8, triton.next_power_of_2(heads // kv_heads)), DIM=dim,
        VALUE_BITS=value_bits, GROUP_SIZE=group_size, SPLIT=workspace.split_tokens,
        PIECE=min(PIECE.value, group_size), SOFTCAP=softcap > 0, SINKS=sinks is not None,
        ASM=capability >= (8, 0), PDL=capability >= (9, 0), STAGES=STAGES,
        PRECISION=precision_of(query),
        num_warps=1 if dim <= 128 else 2, num_stages=STAGES,
    )  # fmt: skip
    merge_splits(workspace, lengths, sinks, out, block=group_size, splits_of=kvarn_splits)
