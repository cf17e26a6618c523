"""Prefill attention over paged KV, flash-attention style: prompt chunks over their contexts; Triton.

The chunks' own keys and values are in their pages already. Decoding needs another kernel: one token per
request leaves the matrix units nothing to do, and the context has to be split.

    q            [T, H, D]            bf16, fp16 or fp32; the tokens of all chunks, one after another
    key_pages    [P, H_kv, page, D]   q's dtype, or float8_e4m3fn or int8, or these as fp16; value_pages alike
    block_table  int32 [R, pages]     page numbers in the order of the context
    tiles        int32 [N, 4]         first token in q, tokens (TILE at most), the first one's position in its
                                      context, row of block_table. Position -1: no context, the tokens get
                                      zeros. No tokens: nothing is done.
    *_scale      as in `decode.py`
    out          [T, H, D]            q's dtype; written if a tile says so

A program handles up to 128 rows, all the G = H / H_kv query heads of 128 / G tokens, so that K and V are read
once for a group. Blocks that every row sees whole are not masked. A token's bits depend only on its own
context, whatever else is in the step and wherever its tile begins. For this, products and sums that a
compiler might fuse in some places only are written as fused operations.

A chunk of n tokens at position p takes 4 * H * D * n * (p + n / 2) operations.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..device import compute_capability, keeps_sums_in_registers
from ..triton_imports import tl, triton
from .options import AttentionOptions

TILE = 128
"""Tokens in a tile, for every number of heads; a program may take a part of one."""
LARGE = 1024
"""Tokens in a step: from here on a program takes 128 rows instead of 64.

The bits are the same on Hopper. With mma.sync they are not: Triton divides 64 rows among the warps by keys,
128 rows by rows.
"""


def prefill_attention_reference(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Compute the kernel's result in fp64, one token at a time; zeros for tokens that no tile covers."""
    sinks, softcap, window = options.sinks, options.softcap, options.sliding_window
    heads, kv_heads, page = q.shape[1], key_pages.shape[1], key_pages.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for first, count, position, row in tiles.tolist():
        for index in range(count if position >= 0 else 0):
            end = position + index + 1
            pages = block_table[row, : triton.cdiv(end, page)].long()
            start = max(end - window, 0) if window else 0
            keys = _gather(key_pages, options.key_scale, pages)[:, start:end]
            values = _gather(value_pages, options.value_scale, pages)[:, start:end]
            query = q[first + index].double().view(kv_heads, heads // kv_heads, -1)
            scores = torch.einsum("hgd,htd->hgt", query, keys) * options.scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.reshape(heads, -1)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().unsqueeze(-1)], dim=-1)
            probabilities = scores.softmax(dim=-1)[:, : end - start].view(kv_heads, heads // kv_heads, -1)
            out[first + index] = torch.einsum("hgt,htd->hgd", probabilities, values).reshape(heads, -1)
    return out


def _gather(pages_of: Tensor, scale: Tensor | None, pages: Tensor) -> Tensor:
    """Return the context's keys or values [H_kv, tokens, D] in fp64, with scales applied."""
    values = pages_of[pages].double()
    if scale is not None:
        by_token = scale.ndim == 3
        values *= scale[pages].double().unsqueeze(-1) if by_token else scale.double().view(1, -1, 1, 1)
    return values.transpose(0, 1).flatten(1, 2)


def tiles_of(first: int, chunks: Sequence[tuple[int, int, int]], padding: int) -> np.ndarray:
    """Return int32 [N, 4] for the tokens of q from `first` on: chunks (tokens, first position, row of the
    block table), one after another, then `padding` tokens of no chunk.

    The longest contexts come first, so that the last programs are short.
    """
    tiles = []
    for count, position, row in chunks:
        for start in range(0, count, TILE):
            tiles.append((first + start, min(TILE, count - start), position + start, row))
        first += count
    tiles.sort(key=lambda tile: -tile[2])
    for start in range(0, padding, TILE):
        tiles.append((first + start, min(TILE, padding - start), -1, 0))
    return np.array(tiles, np.int32).reshape(-1, 4)


class Form(NamedTuple):
    """Compile-time parameters of `_attend_tiles`.

    dim, group: head_dim, and the number of query heads of a kv head, as powers of two
    tokens: tokens of queries in a program
    block:      tokens of keys at a time
    scales:     as in `decode.py`
    by_length:  every tile is the last token of a context, of which only the length is given
    """

    heads: int
    kv_heads: int
    head_dim: int
    dim: int
    group: int
    tokens: int
    page: int
    block: int
    scales: int
    softcap: bool
    window: bool
    sinks: bool
    precision: str
    by_length: bool


@triton.jit
def _attend_block(
    q, acc, largest, total, block, end, position,
    key_ptr, value_ptr, table_ptr, key_scale_ptr, value_scale_ptr,
    scale_log2, softcap, window, kv_head, FORM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take one step of the softmax along the context: tokens block .. block + BLOCK."""
    token = block + tl.arange(0, FORM.block)
    dim = tl.arange(0, FORM.dim)
    if FORM.page % FORM.block == 0:
        page = tl.load(table_ptr + block // FORM.page)
    else:
        page = tl.load(table_ptr + token // FORM.page, mask=token < end, other=0)
    slot = (page.to(tl.int64) * FORM.kv_heads + kv_head) * FORM.page + token % FORM.page
    where = slot[:, None] * FORM.head_dim + dim[None, :]
    keep = (token < end)[:, None] & (dim < FORM.head_dim)[None, :]
    if MASKED or FORM.dim != FORM.head_dim:
        key = tl.load(key_ptr + where, mask=keep, other=0.0)
        value = tl.load(value_ptr + where, mask=keep, other=0.0)
    else:
        key = tl.load(key_ptr + where)
        value = tl.load(value_ptr + where)
    product = tl.dot(q, key.to(q.dtype).T, input_precision=FORM.precision)
    factor = tl.full(product.shape, scale_log2, tl.float32)
    if FORM.scales == 2:
        factor *= tl.load(key_scale_ptr + slot, mask=token < end, other=0.0)[None, :]
    scores = product * factor
    if FORM.softcap:
        # tanh(x) = 1 - 2 / (exp(2x) + 1); scores carry a factor log2(e), and so does softcap.
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
    seen = scores
    if MASKED:
        visible = (token[None, :] <= position[:, None]) & (token < end)[None, :]
        if FORM.window:
            visible = visible & (token[None, :] > position[:, None] - window)
        seen = tl.where(visible, scores, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(seen, axis=1))
    # A row whose window begins further on has seen nothing yet: its scores are all -inf.
    pivot = tl.where(new_largest == -float("inf"), 0.0, new_largest) if FORM.window else new_largest
    rescale = tl.exp2(largest - pivot)
    if FORM.softcap:
        probability = tl.exp2(scores - pivot[:, None])
    else:
        probability = tl.exp2(tl.fma(product, factor, -tl.broadcast_to(pivot[:, None], product.shape)))
    if MASKED:
        probability = tl.where(visible, probability, 0.0)
    total = tl.fma(total, rescale, tl.sum(probability, axis=1))
    acc = acc * rescale[:, None]
    if FORM.scales == 2:
        probability *= tl.load(value_scale_ptr + slot, mask=token < end, other=0.0)[None, :]
    acc = tl.dot(probability.to(q.dtype), value.to(q.dtype), acc, input_precision=FORM.precision)
    return acc, new_largest, total


@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend_tiles(
    q_ptr, key_ptr, value_ptr, table_ptr, tiles_ptr, key_scale_ptr, value_scale_ptr, sinks_ptr, out_ptr,
    scale_log2, softcap, window, table_stride, FORM: tl.constexpr,
):  # fmt: skip
    """Attend for TOKENS tokens of a tile with one kv head's group of query heads.

    With FORM.by_length, tiles_ptr holds the contexts' lengths instead, and every tile is the last token of
    one context.
    """
    ROWS: tl.constexpr = FORM.tokens * FORM.group
    DIM: tl.constexpr = FORM.dim
    kv_head = tl.program_id(0)
    if FORM.by_length:
        first = tl.program_id(2)
        count = 1
        start = tl.load(tiles_ptr + first) - 1
        end = start + 1
        request = first
    else:
        tile = tiles_ptr + tl.program_id(2) * 4
        offset = tl.program_id(1) * FORM.tokens
        count = tl.minimum(tl.load(tile + 1) - offset, FORM.tokens)
        if count <= 0:
            return
        first = tl.load(tile) + offset
        start = tl.load(tile + 2)
        end = 0
        if start >= 0:
            start += offset
            end = start + count
        request = tl.load(tile + 3)
    table_ptr += request.to(tl.int64) * table_stride

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    token = row // FORM.group
    group = row % FORM.group
    head = kv_head * (FORM.heads // FORM.kv_heads) + group
    position = start + token
    at = ((first + token).to(tl.int64) * FORM.heads + head)[:, None] * FORM.head_dim + dim[None, :]
    is_row = (token < count) & (group < FORM.heads // FORM.kv_heads)
    keep = is_row[:, None] & (dim < FORM.head_dim)[None, :]
    q = tl.load(q_ptr + at, mask=keep, other=0.0)
    if FORM.scales != 0:
        # Every e4m3 and int8 value is an fp16 one.
        q = q.to(tl.float16)
    value_scale = 1.0
    if FORM.scales == 1:
        scale_log2 *= tl.load(key_scale_ptr + kv_head)
        value_scale = tl.load(value_scale_ptr + kv_head)

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if FORM.sinks:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0)
        largest = sink.to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([ROWS, DIM], tl.float32)
    if FORM.window:
        masked_from = tl.maximum(start - window + 1, 0) // FORM.block * FORM.block
    else:
        masked_from = tl.minimum(start + 1, end) // FORM.block * FORM.block
        for block in tl.range(0, masked_from, FORM.block):
            acc, largest, total = _attend_block(
                q, acc, largest, total, block, end, position,
                key_ptr, value_ptr, table_ptr, key_scale_ptr, value_scale_ptr,
                scale_log2, softcap, window, kv_head, FORM, False,
            )  # fmt: skip
    for block in tl.range(masked_from, end, FORM.block):
        acc, largest, total = _attend_block(
            q, acc, largest, total, block, end, position,
            key_ptr, value_ptr, table_ptr, key_scale_ptr, value_scale_ptr,
            scale_log2, softcap, window, kv_head, FORM, True,
        )  # fmt: skip
    result = tl.where(total[:, None] > 0, acc / total[:, None], 0.0) * value_scale
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=keep)


MANY_ROWS = 128


def program_sizes(
    count: int, dim: int, itemsize: int, page_itemsize: int, one_form: bool = False
) -> tuple[int, int]:
    """Return the rows of queries in a program, counting a group's heads, and the keys per block.

    The step has `count` tokens; `dim` is a power of two; the bytes are those of an element of queries and of
    a stored element.
    one_form: whether the sizes must be the same for every count
    """
    wide = itemsize == 4 or dim > 128
    if itemsize * dim > 512:
        return 32, 32  # 64 rows of float32 and their keys and values would not fit into shared memory.
    # Twice the rows for as much of keys and values, where there are programs enough and registers for two.
    many = count > LARGE and not wide and page_itemsize == 2 and not one_form
    return MANY_ROWS if many else 64, 32 if wide else 64


def prefill_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    options: AttentionOptions,
    out: Tensor,
    one_form: bool = False,
) -> None:
    """Write the tiles' tokens of `out`; arguments are as in the file's docstring.

    tiles: as `tiles_of` returns them, or the lengths of contexts, int32 [R]. With lengths, row r of q is the
           last token of context r, and its result has the bits that it would have in a prompt's chunk
    one_form: the same program for every number of tokens

    The kernel compiles once for given head counts, page size and KV dtype; it specializes on no running size.
    """
    count, heads, head_dim = q.shape
    kv_heads, page = key_pages.shape[1], key_pages.shape[2]
    dim, group = triton.next_power_of_2(head_dim), triton.next_power_of_2(heads // kv_heads)
    rows, block = program_sizes(count, dim, q.element_size(), key_pages.element_size(), one_form)
    tokens = max(1, rows // group)
    by_length = tiles.ndim == 1
    form = Form(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dim=dim,
        group=group,
        tokens=tokens,
        page=page,
        block=block,
        scales=options.scales,
        softcap=bool(options.softcap),
        window=options.window > 0,
        sinks=options.sinks is not None,
        precision="tf32x3" if q.element_size() == 4 else "tf32",
        by_length=by_length,
    )
    # For two programs to an SM, where that costs no spilled registers.
    capped = rows == MANY_ROWS and not keeps_sums_in_registers(compute_capability(q.device))
    _attend_tiles[(kv_heads, 1 if by_length else TILE // tokens, len(tiles))](
        q, key_pages, value_pages, block_table, tiles, options.key_scale, options.value_scale, options.sinks,
        out, options.scale_log2, options.softcap_log2, options.window, block_table.stride(0), form,
        num_warps=8 if rows == MANY_ROWS else 4, num_stages=2, maxnreg=128 if capped else None,
    )  # fmt: skip
