"""Decode attention over KVarN pages, split-KV, with the uncoded first and last page; Triton.

    query        [B, H, D]             one token a request, not rotated, contiguous; bf16, fp16 or fp32
    turned_q     fp16 [B, H, D]        rotated, of contexts that have codes (`held.py`)
    pages        KVarNTile of [P, H_kv] tiles
    held         [rows, 2, 2, H_kv, G, D]   query's dtype: the first page and the one being written, keys
                                       and values, as they came
    block_table  int32 [B, pages]      lengths int32 [B], the current token included; 0 gives a row of zeros
    request_rows int64 [B]             the row of `held` that each request has
    out          [B, H, D]             query's dtype

Page 0 and the page of the current token are read from `held`, all other pages as codes. A split is coded or
plain. Coded splits are runs of whole pages and take rotated queries; the merge rotates their sum back. A
plain split has at most PIECE tokens, all of one uncoded page. Coded splits are numbered first: they take
longest, and a program takes every n-th split. How a request is split follows from the length of its context
alone.

A program is one warp, or two for heads of 256 channels. A program handles one (request, kv head, run of
splits) with all the query heads of the group, each in two columns of products over codes (`int8_page.py`).

A request of L tokens reads L * H_kv * (D * (4 + value_bits) / 8 + 6 * (D + G) / G) bytes, and D * 4 for each
held token.
"""

from typing import NamedTuple

from torch import Tensor

from ...device import compute_capability
from ...hadamard import log2, rotate
from ...triton_imports import tl, triton
from ..coded.softmax import (
    attend_plain,
    load_columns,
    load_slices,
    precision_of,
    programs_of_splits,
    store_columns,
)
from ..decode import DecodeWorkspace, add_splits
from ..options import AttentionOptions
from .held import held_at
from .int8_page import attend_page_int8
from .reference import KVarNTile

PIECE = tl.constexpr(64)
"""Tokens of a plain split."""
PLAIN_BLOCK = 32
"""Of these, at a time."""
REGISTERS = {2: 168, 4: 184}
"""By bits of a value, of a thread of the one warp that is a program: twelve share an SM, or eleven."""
STAGES = 2
"""Codes and scales of a page are in flight while the page before is multiplied."""


@triton.jit
def _coded_splits(length, SPLIT: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Return the number of pages in a coded split, and the number of coded splits. A split has one page if
    there are up to four pages, two if there are up to eight, and SPLIT tokens beyond.
    """
    pages = tl.maximum((length - 1) // GROUP_SIZE - 1, 0)
    pages_at_once = tl.where(pages <= 4, 1, tl.where(pages <= 8, 2, max(1, SPLIT // GROUP_SIZE)))
    return pages_at_once, tl.cdiv(pages, pages_at_once)


@triton.jit
def kvarn_splits(length, SPLIT: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Return the number of a context's coded splits, and of all its splits."""
    _, coded = _coded_splits(length, SPLIT, GROUP_SIZE)
    own_page = tl.maximum(length - 1, 0) // GROUP_SIZE
    own = tl.where(own_page > 0, length - own_page * GROUP_SIZE, 0)
    piece: tl.constexpr = min(PIECE, GROUP_SIZE)
    return coded, coded + tl.cdiv(tl.minimum(length, GROUP_SIZE), piece) + tl.cdiv(own, piece)


def plain_splits(group_size: int) -> int:
    """Return the largest number of uncoded splits of a context; the workspace needs room for them."""
    return 2 * triton.cdiv(group_size, PIECE.value)


class Form(NamedTuple):
    """Compile-time parameters of `_attend_splits`.

    group:              query heads of a kv head, as a power of two, 4 at least
    split:              tokens of a long context's coded split
    piece, plain_block: tokens of a plain split, and how many of them are read at a time
    """

    heads: int
    kv_heads: int
    group: int
    dim: int
    value_bits: int
    group_size: int
    split: int
    piece: int
    plain_block: int
    softcap: bool
    sinks: bool
    asm: bool
    pdl: bool
    stages: int
    precision: str


@triton.jit
def _attend_coded(
    q, table_ptr, page, end_page, kv_head,
    words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, scale_log2, softcap, FORM: tl.constexpr,
):  # fmt: skip
    """Return sums [M] in log2, and the result of whole pages, slices [D/4, M], still rotated."""
    WIDTH: tl.constexpr = FORM.dim // 4
    HEADS: tl.constexpr = q[0].shape[1] // 2
    largest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc0 = tl.zeros([WIDTH, HEADS], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    tile = tl.load(table_ptr + page).to(tl.int64) * FORM.kv_heads + kv_head
    for index in tl.range(page, end_page, num_stages=FORM.stages):
        this_tile = tile
        # A page ahead, so that no load of codes waits for the table.
        tile = tl.load(table_ptr + index + 1, mask=index + 1 < end_page, other=0).to(tl.int64) * FORM.kv_heads
        tile += kv_head
        acc0, acc1, acc2, acc3, largest, total = attend_page_int8(
            q, (acc0, acc1, acc2, acc3), largest, total,
            this_tile, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, scale_log2, softcap,
            FORM.value_bits, FORM.group_size, FORM.dim, FORM.softcap, FORM.asm,
        )  # fmt: skip
    by = (1.0 / total)[None, :]
    return largest + tl.log2(total), acc0 * by, acc1 * by, acc2 * by, acc3 * by


@triton.jit
def _attend_plain_piece(
    q_ptr, at_head, is_head, held_ptr, key_at, value_at, count, scale_log2, softcap,
    BLOCK: tl.constexpr, DIM: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return sums [M] in log2, and the result, slices [D/4, M], of `count` tokens that lie side by side."""
    WIDTH: tl.constexpr = DIM // 4
    largest = tl.full([at_head.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([at_head.shape[0]], tl.float32)
    acc0 = tl.zeros([WIDTH, at_head.shape[0]], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    q = load_columns(q_ptr, at_head, is_head, tl.arange(0, WIDTH), WIDTH)
    for first in tl.range(0, count, BLOCK, num_stages=STAGES):
        token = first + tl.arange(0, BLOCK)
        is_token = token < count
        keys = load_slices(held_ptr, key_at + token * DIM, is_token, WIDTH)
        values = load_slices(held_ptr, value_at + token * DIM, is_token, WIDTH)
        acc0, acc1, acc2, acc3, largest, total = attend_plain(
            q, (acc0, acc1, acc2, acc3), largest, total, keys, values,
            is_token[:, None], scale_log2, softcap, SOFTCAP, PRECISION,
        )  # fmt: skip
    by = (1.0 / total)[None, :]
    return largest + tl.log2(total), acc0 * by, acc1 * by, acc2 * by, acc3 * by


@triton.jit(do_not_specialize=["table_stride", "max_splits"])
def _attend_splits(
    q_ptr, turned_ptr, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, held_ptr,
    block_table_ptr, lengths_ptr, rows_ptr, partial_ptr, lse_ptr, out_ptr,
    scale_log2, softcap, table_stride, max_splits, FORM: tl.constexpr,
):  # fmt: skip
    """Compute partial softmax sums of every `num_programs(0)`-th split. If there is only one split, write the
    result.
    """
    PRECISION: tl.constexpr = FORM.precision
    if FORM.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = FORM.dim // 4
    PER_HEAD: tl.constexpr = FORM.heads // FORM.kv_heads
    request = tl.program_id(2)
    kv_head = tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    first_head = request * FORM.heads + kv_head * PER_HEAD
    channel = tl.arange(0, WIDTH)
    pages_at_once, coded = _coded_splits(length, FORM.split, FORM.group_size)
    split = tl.program_id(0)

    if split < coded:
        end_page = (length - 1) // FORM.group_size
        table_ptr = block_table_ptr + request * table_stride
        column = tl.arange(0, 2 * FORM.group) // 2
        at_column = (first_head + column).to(tl.int64) * FORM.dim
        q = load_columns(turned_ptr, at_column, column < PER_HEAD, channel, WIDTH)
        while split < coded:
            page = 1 + split * pages_at_once
            lse, r0, r1, r2, r3 = _attend_coded(
                q, table_ptr, page, tl.minimum(page + pages_at_once, end_page), kv_head,
                words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, scale_log2, softcap, FORM,
            )  # fmt: skip
            group = tl.arange(0, FORM.group)
            at = (first_head + group) * max_splits + split
            tl.store(lse_ptr + at, lse, mask=group < PER_HEAD)
            to = at.to(tl.int64) * FORM.dim
            store_columns(partial_ptr, to, group < PER_HEAD, r0, r1, r2, r3, channel, WIDTH)
            split += tl.num_programs(0)

    # Anew, so that nothing of it takes a register before.
    length = tl.load(lengths_ptr + request)
    _, coded = _coded_splits(length, FORM.split, FORM.group_size)
    _, end = kvarn_splits(length, FORM.split, FORM.group_size)
    row = tl.load(rows_ptr + request)
    # Matrix units take eight columns.
    group = tl.arange(0, max(8, FORM.group))
    head = first_head + group
    at_head = head.to(tl.int64) * FORM.dim
    first_pieces = tl.cdiv(tl.minimum(length, FORM.group_size), FORM.piece)
    while split < end:
        piece = split - coded
        is_first = piece < first_pieces
        page_start = tl.where(is_first, 0, (length - 1) // FORM.group_size * FORM.group_size)
        start = page_start + tl.where(is_first, piece, piece - first_pieces) * FORM.piece
        page_end = tl.where(is_first, tl.minimum(length, FORM.group_size), length)
        count = tl.minimum(page_end - start, FORM.piece)
        key_at = held_at(row, start, 0, kv_head, FORM.kv_heads, FORM.dim, FORM.group_size)
        value_at = held_at(row, start, 1, kv_head, FORM.kv_heads, FORM.dim, FORM.group_size)
        lse, r0, r1, r2, r3 = _attend_plain_piece(
            q_ptr, at_head, group < PER_HEAD, held_ptr, key_at, value_at, count, scale_log2, softcap,
            FORM.plain_block, FORM.dim, FORM.softcap, PRECISION, FORM.stages,
        )  # fmt: skip
        if (end == 1) & (not FORM.sinks):
            store_columns(out_ptr, at_head, group < PER_HEAD, r0, r1, r2, r3, channel, WIDTH)
        else:
            at = head * max_splits + split
            tl.store(lse_ptr + at, lse, mask=group < PER_HEAD)
            to = at.to(tl.int64) * FORM.dim
            store_columns(partial_ptr, to, group < PER_HEAD, r0, r1, r2, r3, channel, WIDTH)
        split += tl.num_programs(0)


@triton.jit(do_not_specialize=["max_splits"])
def _merge_splits(
    partial_ptr, lse_ptr, lengths_ptr, sinks_ptr, out_ptr, max_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr, SPLIT: tl.constexpr,
    GROUP_SIZE: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge a head's result: first the coded splits, whose sum is rotated back, then the plain splits, each
    kind in its order.
    """
    if PDL:
        # What comes next may fetch its weights meanwhile, and waits itself.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(1)
    head = tl.program_id(0)
    length = tl.load(lengths_ptr + request)
    coded, end = kvarn_splits(length, SPLIT, GROUP_SIZE)
    if (end == 1) & (not SINKS):
        return
    at = (request * HEADS + head).to(tl.int64)
    largest = -float("inf")
    total = 0.0
    if SINKS:
        largest = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    acc = tl.zeros([DIM], tl.float32)
    if coded > 0:
        acc, largest, total = add_splits(
            acc, largest, total, 0, coded, at * max_splits, partial_ptr, lse_ptr, DIM, DIM, SPLITS_AT_ONCE
        )
        acc = tl.reshape(rotate(tl.reshape(acc, [1, DIM]), 1, DIM, LOG_DIM), [DIM])
    acc, largest, total = add_splits(
        acc, largest, total, coded, end, at * max_splits, partial_ptr, lse_ptr, DIM, DIM, SPLITS_AT_ONCE
    )
    out = tl.where(total > 0, acc / total, 0.0)
    tl.store(out_ptr + at * DIM + tl.arange(0, DIM), out.to(out_ptr.dtype.element_ty))


def kvarn_decode(
    query: Tensor,
    turned_q: Tensor,
    pages: KVarNTile,
    held: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    request_rows: Tensor,
    workspace: DecodeWorkspace,
    *,
    value_bits: int,
    options: AttentionOptions,
    out: Tensor,
) -> None:
    """Write `out`; arguments are as in the file's docstring.

    The workspace has `plain_splits` further splits.
    """
    batch, heads, dim = query.shape
    kv_heads, group_size = held.shape[3:5]
    splits = programs_of_splits(workspace.max_splits, batch * kv_heads)
    capability = compute_capability(query.device)
    pdl, is_narrow = capability >= (9, 0), dim <= 128
    piece = min(PIECE.value, group_size)
    form = Form(
        heads=heads,
        kv_heads=kv_heads,
        group=max(4, triton.next_power_of_2(heads // kv_heads)),
        dim=dim,
        value_bits=value_bits,
        group_size=group_size,
        split=workspace.split_tokens,
        piece=piece,
        plain_block=min(PLAIN_BLOCK, piece),
        softcap=bool(options.softcap),
        sinks=options.sinks is not None,
        asm=capability >= (8, 0),
        pdl=pdl,
        stages=STAGES,
        precision=precision_of(query),
    )
    _attend_splits[(splits, kv_heads, batch)](
        query, turned_q, *vars(pages).values(), held,
        block_table, lengths, request_rows, workspace.partial, workspace.lse, out,
        options.scale_log2, options.softcap_log2, block_table.stride(0), workspace.max_splits, form,
        num_warps=1 if is_narrow else 2, num_stages=STAGES,
        maxnreg=REGISTERS[value_bits] if is_narrow else None,
    )  # fmt: skip
    _merge_splits[(heads, batch)](
        workspace.partial, workspace.lse, lengths, options.sinks, out, workspace.max_splits,
        HEADS=heads, DIM=dim, LOG_DIM=log2(dim), SPLIT=workspace.split_tokens, GROUP_SIZE=group_size,
        SPLITS_AT_ONCE=8, SINKS=options.sinks is not None, PDL=pdl,
        num_warps=1 if is_narrow else 2, launch_pdl=pdl,
    )  # fmt: skip
