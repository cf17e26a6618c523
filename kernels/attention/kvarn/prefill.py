"""Prefill attention over KVarN pages, a prompt's chunk over its context; Triton.

    query                          [T, H, D]      the step's tokens, not rotated, contiguous; any float dtype
    key, value                     [T, H_kv, D]   alike, a token's heads contiguous
    pages, held, block_table       as in `decode.py`; pages that the chunk fills are written already
    tiles                          int32 [N, 4] as in `../prefill.py`
    seq_lens, query_start_loc      int32 [R], [R + 1]: context of each request, and its tokens in the step
    out                            [T, H, D]      written if a tile says so

A token sees its own page and page 0 uncoded, all pages between as codes. Uncoded tokens are read from the
step if they are in the chunk, else from `held`. The result therefore does not depend on how a prompt was cut
into chunks.

A program handles up to 64 queries: all heads of a group for some tokens. A program attends to uncoded tokens
first. If coded pages follow, the program rotates the queries and the results so far, multiplies packed codes
as decoding does, and rotates the results back at the end.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...device import compute_capability
from ...hadamard import _matrix, rotate_slices
from ...triton_imports import tl, triton
from ..coded.softmax import attend_plain, load_columns, load_slices, precision_of, store_columns
from ..options import AttentionOptions
from ..prefill import TILE
from .held import held_at
from .page import attend_page
from .reference import KVarNTile

QUERIES = 64
PLAIN_BLOCK = 32
"""Tokens that are not coded, at a time."""


@triton.jit
def _older_or_new(
    held_ptr, new_ptr, row, token, side, first, new_stride, chunk_start, kv_head, is_token,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Load four slices of the unquantized keys or values of the tokens [N] of a context."""
    is_new = token >= chunk_start
    older = held_at(row, token, side, kv_head, KV_HEADS, DIM, GROUP_SIZE)
    new = (first + token - chunk_start).to(tl.int64) * new_stride + kv_head * DIM
    o0, o1, o2, o3 = load_slices(held_ptr, older, is_token & ~is_new, DIM // 4)
    n0, n1, n2, n3 = load_slices(new_ptr, new, is_token & is_new, DIM // 4)
    return o0 + n0, o1 + n1, o2 + n2, o3 + n3


class Form(NamedTuple):
    """Compile-time parameters of `_attend_tiles`; tokens: of a program; plain_block: uncoded keys per block.

    group: query heads of a kv head, as a power of two
    """

    heads: int
    kv_heads: int
    group: int
    tokens: int
    dim: int
    value_bits: int
    group_size: int
    plain_block: int
    softcap: bool
    sinks: bool
    asm: bool
    precision: str


@triton.jit(do_not_specialize=["table_stride"])
def _attend_tiles(
    q_ptr, key_ptr, value_ptr, pages, held_ptr, matrix_ptr,
    block_table_ptr, tiles_ptr, seq_lens_ptr, starts_ptr, rows_ptr, sinks_ptr, out_ptr,
    scale_log2, softcap, key_stride, value_stride, table_stride, FORM: tl.constexpr,
):  # fmt: skip
    """Attend for FORM.tokens tokens of a tile with one kv head's group of query heads.

    pages: the parts of a `KVarNTile`
    """
    ROWS: tl.constexpr = FORM.tokens * FORM.group
    PRECISION: tl.constexpr = FORM.precision
    words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr = pages
    WIDTH: tl.constexpr = FORM.dim // 4
    tile = tiles_ptr + tl.program_id(2) * 4
    offset = tl.program_id(1) * FORM.tokens
    kv_head = tl.program_id(0)
    count = tl.minimum(tl.load(tile + 1) - offset, FORM.tokens)
    if count <= 0:
        return
    first = tl.load(tile) + offset
    start = tl.load(tile + 2)
    request = tl.load(tile + 3)
    line = tl.arange(0, ROWS)
    token = line // FORM.group
    group = line % FORM.group
    head = kv_head * (FORM.heads // FORM.kv_heads) + group
    is_row = (token < count) & (group < FORM.heads // FORM.kv_heads)
    at_row = ((first + token).to(tl.int64) * FORM.heads + head) * FORM.dim
    channel = tl.arange(0, WIDTH)
    acc0 = tl.zeros([WIDTH, ROWS], tl.float32)
    if start < 0:
        store_columns(out_ptr, at_row, is_row, acc0, acc0, acc0, acc0, channel, WIDTH)
        return
    acc1, acc2, acc3 = acc0, acc0, acc0
    start += offset
    end = start + count
    position = start + token
    first_in_step = tl.load(starts_ptr + request)
    chunk_start = tl.load(seq_lens_ptr + request) - (tl.load(starts_ptr + request + 1) - first_in_step)
    row = tl.load(rows_ptr + request)
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    q0, q1, q2, q3 = load_columns(q_ptr, at_row, is_row, channel, WIDTH)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if FORM.sinks:
        largest = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0

    # Page 0, then the pages that the rows are on; every row sees token 0, so none is without a key after it.
    own_from = tl.maximum(start // FORM.group_size, 1) * FORM.group_size
    blocks_of_first = tl.cdiv(tl.minimum(end, FORM.group_size), FORM.plain_block)
    blocks = blocks_of_first + tl.cdiv(tl.maximum(end - own_from, 0), FORM.plain_block)
    for index in range(0, blocks):
        block = tl.where(
            index < blocks_of_first,
            index * FORM.plain_block,
            own_from + (index - blocks_of_first) * FORM.plain_block,
        )
        key = block + tl.arange(0, FORM.plain_block)
        keys = _older_or_new(
            held_ptr, key_ptr, row, key, 0, first_in_step, key_stride, chunk_start, kv_head, key < end,
            FORM.kv_heads, FORM.dim, FORM.group_size,
        )  # fmt: skip
        values = _older_or_new(
            held_ptr, value_ptr, row, key, 1, first_in_step, value_stride, chunk_start, kv_head, key < end,
            FORM.kv_heads, FORM.dim, FORM.group_size,
        )  # fmt: skip
        in_plain = (key[:, None] < FORM.group_size) | (
            key[:, None] // FORM.group_size == position[None, :] // FORM.group_size
        )
        acc0, acc1, acc2, acc3, largest, total = attend_plain(
            (q0, q1, q2, q3), (acc0, acc1, acc2, acc3), largest, total, keys, values,
            in_plain & (key[:, None] <= position[None, :]), scale_log2, softcap, FORM.softcap, PRECISION,
        )  # fmt: skip
    by = (1.0 / total)[None, :]
    last_page = (end - 1) // FORM.group_size
    if last_page <= 1:
        store_columns(out_ptr, at_row, is_row, acc0 * by, acc1 * by, acc2 * by, acc3 * by, channel, WIDTH)
        return
    q0, q1, q2, q3 = rotate_slices(q0, q1, q2, q3, matrix_ptr, WIDTH)
    # By way of memory, as in decoding; where their results are to be.
    scratch_ptr = out_ptr.to(tl.pointer_type(tl.float16))
    at_scratch = at_row * (out_ptr.dtype.element_ty.primitive_bitwidth // 16)
    store_columns(scratch_ptr, at_scratch, is_row, q0, q1, q2, q3, channel, WIDTH)
    tl.debug_barrier()
    q0, q1, q2, q3 = load_columns(scratch_ptr, at_scratch, is_row, channel, WIDTH)
    # As averages, which 16 bits hold whatever the context's length.
    acc0, acc1, acc2, acc3 = rotate_slices(acc0 * by, acc1 * by, acc2 * by, acc3 * by, matrix_ptr, WIDTH)
    back = total[None, :]
    acc0, acc1, acc2, acc3 = acc0 * back, acc1 * back, acc2 * back, acc3 * back
    # Rows past the tile's end count as its last one.
    own_page = tl.minimum(position, end - 1) // FORM.group_size
    for page in range(1, last_page):
        acc0, acc1, acc2, acc3, largest, total = attend_page(
            (q0, q1, q2, q3), (acc0, acc1, acc2, acc3), largest, total,
            tl.load(table_ptr + page).to(tl.int64) * FORM.kv_heads + kv_head,
            words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, page < own_page, scale_log2, softcap,
            FORM.value_bits, FORM.group_size, FORM.dim, FORM.softcap, FORM.asm,
        )  # fmt: skip
    by = (1.0 / total)[None, :]
    r0, r1, r2, r3 = rotate_slices(acc0 * by, acc1 * by, acc2 * by, acc3 * by, matrix_ptr, WIDTH)
    store_columns(out_ptr, at_row, is_row, r0, r1, r2, r3, channel, WIDTH)


def kvarn_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: KVarNTile,
    held: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    request_rows: Tensor,
    *,
    value_bits: int,
    options: AttentionOptions,
    out: Tensor,
) -> None:
    """Write the tiles' tokens of `out`; arguments are as in the file's docstring."""
    capability = compute_capability(query.device)
    _, heads, dim = query.shape
    kv_heads, group_size = held.shape[3:5]
    group = triton.next_power_of_2(heads // kv_heads)
    tokens = max(1, QUERIES // group)
    form = Form(
        heads=heads,
        kv_heads=kv_heads,
        group=group,
        tokens=tokens,
        dim=dim,
        value_bits=value_bits,
        group_size=group_size,
        plain_block=min(PLAIN_BLOCK, group_size),
        softcap=bool(options.softcap),
        sinks=options.sinks is not None,
        asm=capability >= (8, 0),
        precision=precision_of(query),
    )
    _attend_tiles[(kv_heads, TILE // tokens, len(tiles))](
        query, key, value, tuple(vars(pages).values()), held,
        _matrix(dim // 4, query.device, torch.float16),
        block_table, tiles, seq_lens, query_start_loc, request_rows, options.sinks, out,
        options.scale_log2, options.softcap_log2, key.stride(0), value.stride(0), block_table.stride(0), form,
        # Four warps spill 1184 bytes of a thread on 10.x, eight 184.
        num_warps=8 if capability[0] == 10 else 4, num_stages=2,
    )  # fmt: skip
