"""Prefill attention over pages of int4 or NVFP4 tokens: a prompt's chunk over its context; Triton.

    q       [T, H, D]      rotated where the pages are (fp16), else any float dtype
    tiles   int32 [N, 4]   as in `../prefill.py`
    out     [T, H, D]      still rotated where the pages are; written if a tile says so

The chunk's own tokens are already in their pages. A program handles up to 64 queries: all heads of a group
for some tokens. Packed codes are multiplied directly, as in the decode kernel.
"""

from typing import NamedTuple

from torch import Tensor

from ...device import compute_capability
from ...triton_imports import tl, triton
from ..coded.softmax import load_columns, store_columns
from ..options import AttentionOptions
from ..prefill import TILE
from .block import attend_block, finished, first_channels, prepared
from .decode import scale_bytes
from .store import TokenPages

QUERIES = 64
BLOCK = 64


class Form(NamedTuple):
    """Compile-time parameters of `_attend_tiles`; tokens: of a program; block: tokens of keys per block.

    group: query heads of a kv head, as a power of two
    """

    heads: int
    kv_heads: int
    group: int
    tokens: int
    dim: int
    page: int
    block: int
    nvfp4: bool
    softcap: bool
    window: bool
    sinks: bool
    asm: bool


@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend_tiles(
    q_ptr, words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr, head_scale_k_ptr, head_scale_v_ptr,
    block_table_ptr, tiles_ptr, sinks_ptr, out_ptr, scale_log2, softcap, window, table_stride,
    FORM: tl.constexpr,
):  # fmt: skip
    """Attend for FORM.tokens tokens of a tile with one kv head's group of query heads."""
    ROWS: tl.constexpr = FORM.tokens * FORM.group
    WIDTH: tl.constexpr = FORM.dim // 4
    STEP: tl.constexpr = FORM.dim // 16 if FORM.nvfp4 else WIDTH
    channel = first_channels(FORM.dim, FORM.nvfp4)
    tile = tiles_ptr + tl.program_id(2) * 4
    offset = tl.program_id(1) * FORM.tokens
    kv_head = tl.program_id(0)
    count = tl.minimum(tl.load(tile + 1) - offset, FORM.tokens)
    if count <= 0:
        return
    first = tl.load(tile) + offset
    start = tl.load(tile + 2)
    end = 0
    if start >= 0:
        start += offset
        end = start + count
    table_ptr = block_table_ptr + tl.load(tile + 3).to(tl.int64) * table_stride
    line = tl.arange(0, ROWS)
    token = line // FORM.group
    group = line % FORM.group
    head = kv_head * (FORM.heads // FORM.kv_heads) + group
    is_row = (token < count) & (group < FORM.heads // FORM.kv_heads)
    at_row = ((first + token).to(tl.int64) * FORM.heads + head) * FORM.dim
    position = start + token
    q0, q1, q2, q3 = load_columns(q_ptr, at_row, is_row, channel, STEP)
    q0, q1, q2, q3, q_sum = prepared(q0, q1, q2, q3, FORM.nvfp4)
    head_scale = 1.0
    if FORM.nvfp4:
        scale_log2 *= tl.load(head_scale_k_ptr + kv_head)
        head_scale = tl.load(head_scale_v_ptr + kv_head)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    zeros = tl.zeros([ROWS], tl.float32)
    if FORM.sinks:
        largest = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc0 = tl.zeros([WIDTH, ROWS], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    first_block = 0
    if FORM.window:
        first_block = tl.maximum(start - window + 1, 0) // FORM.block * FORM.block
    for block in range(first_block, end, FORM.block):
        key = block + tl.arange(0, FORM.block)
        page = tl.load(table_ptr + key // FORM.page, mask=key < end, other=0)
        slot = (page.to(tl.int64) * FORM.kv_heads + kv_head) * FORM.page + key % FORM.page
        visible = (key[:, None] <= position[None, :]) & (key < end)[:, None]
        if FORM.window:
            visible = visible & (key[:, None] > position[None, :] - window)
        acc0, acc1, acc2, acc3, zeros, largest, total = attend_block(
            (q0, q1, q2, q3), q_sum, (acc0, acc1, acc2, acc3), zeros, largest, total,
            slot, key < end, visible, words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr,
            scale_log2, softcap, FORM.nvfp4, FORM.dim, FORM.softcap, FORM.asm,
        )  # fmt: skip
    r0 = finished(acc0, zeros, total, head_scale, 0, FORM.nvfp4)
    r1 = finished(acc1, zeros, total, head_scale, 1, FORM.nvfp4)
    r2 = finished(acc2, zeros, total, head_scale, 2, FORM.nvfp4)
    r3 = finished(acc3, zeros, total, head_scale, 3, FORM.nvfp4)
    store_columns(out_ptr, at_row, is_row, r0, r1, r2, r3, channel, STEP)


def token_prefill(
    q: Tensor,
    keys: TokenPages,
    values: TokenPages,
    block_table: Tensor,
    tiles: Tensor,
    options: AttentionOptions,
    out: Tensor,
) -> None:
    """Write the tiles' tokens of `out`; arguments are as in the file's docstring."""
    _, heads, dim = q.shape
    kv_heads, page = keys.words.shape[1:3]
    group = triton.next_power_of_2(heads // kv_heads)
    tokens = max(1, QUERIES // group)
    form = Form(
        heads=heads,
        kv_heads=kv_heads,
        group=group,
        tokens=tokens,
        dim=dim,
        page=page,
        block=BLOCK,
        nvfp4=keys.is_nvfp4,
        softcap=bool(options.softcap),
        window=options.window > 0,
        sinks=options.sinks is not None,
        asm=compute_capability(q.device) >= (8, 0),
    )
    _attend_tiles[(kv_heads, TILE // tokens, len(tiles))](
        q, keys.words, values.words, *scale_bytes(keys, values), keys.head_scale, values.head_scale,
        block_table, tiles, options.sinks, out,
        options.scale_log2, options.softcap_log2, options.window, block_table.stride(0), form,
        num_warps=4, num_stages=2,
    )  # fmt: skip
