"""Prefill attention over pages of int4 or NVFP4 tokens: a prompt's chunk over its context; Triton.

    q       [T, H, D]      rotated where the pages are (fp16), else any float dtype
    tiles   int32 [N, 4]   as in `prefill_attention.py`
    out     [T, H, D]      still rotated where the pages are; written where a tile says so

The chunk's own tokens are in their pages already. A program takes up to 64 queries, all heads of a group
for some tokens; codes are multiplied as they are packed, as in decoding.
"""

from torch import Tensor

from ...device import compute_capability
from ...triton_imports import tl, triton
from ..coded.softmax import load_columns, store_columns
from ..decode import LOG2_E
from ..prefill import TILE
from .block import attend_block, finished, first_channels, prepared
from .decode import scale_bytes
from .store import TokenPages

QUERIES = 64
BLOCK = 64


@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend_tiles(
    q_ptr, words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr, head_scale_k_ptr, head_scale_v_ptr,
    block_table_ptr, tiles_ptr, sinks_ptr, out_ptr, scale_log2, softcap, window, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, NVFP4: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a tile with one kv head's group of query heads."""
    WIDTH: tl.constexpr = DIM // 4
    STEP: tl.constexpr = DIM // 16 if NVFP4 else WIDTH
    channel = first_channels(DIM, NVFP4)
    tile = tiles_ptr + tl.program_id(2) * 4
    offset = tl.program_id(1) * TOKENS
    kv_head = tl.program_id(0)
    count = tl.minimum(tl.load(tile + 1) - offset, TOKENS)
    if count <= 0:
        return
    first = tl.load(tile) + offset
    start = tl.load(tile + 2)
    end = 0
    if start >= 0:
        start += offset
        end = start + count
    table_ptr = block_table_ptr + tl.load(tile + 3).to(tl.int64) * table_stride
    line = tl.arange(0, TOKENS * GROUP)
    token = line // GROUP
    group = line % GROUP
    head = kv_head * (HEADS // KV_HEADS) + group
    is_row = (token < count) & (group < HEADS // KV_HEADS)
    at_row = ((first + token).to(tl.int64) * HEADS + head) * DIM
    position = start + token
    q0, q1, q2, q3 = load_columns(q_ptr, at_row, is_row, channel, STEP)
    q0, q1, q2, q3, q_sum = prepared(q0, q1, q2, q3, NVFP4)
    head_scale = 1.0
    if NVFP4:
        scale_log2 *= tl.load(head_scale_k_ptr + kv_head)
        head_scale = tl.load(head_scale_v_ptr + kv_head)
    largest = tl.full([TOKENS * GROUP], -float("inf"), tl.float32)
    total = tl.zeros([TOKENS * GROUP], tl.float32)
    zeros = tl.zeros([TOKENS * GROUP], tl.float32)
    if SINKS:
        largest = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc0 = tl.zeros([WIDTH, TOKENS * GROUP], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    first_block = 0
    if WINDOW:
        first_block = tl.maximum(start - window + 1, 0) // BLOCK * BLOCK
    for block in range(first_block, end, BLOCK):
        key = block + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + key // PAGE, mask=key < end, other=0)
        slot = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + key % PAGE
        visible = (key[:, None] <= position[None, :]) & (key < end)[:, None]
        if WINDOW:
            visible = visible & (key[:, None] > position[None, :] - window)
        acc0, acc1, acc2, acc3, zeros, largest, total = attend_block(
            q0, q1, q2, q3, q_sum, acc0, acc1, acc2, acc3, zeros, largest, total,
            slot, key < end, visible, words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr,
            scale_log2, softcap, NVFP4, DIM, SOFTCAP, ASM,
        )  # fmt: skip
    r0 = finished(acc0, zeros, total, head_scale, 0, NVFP4)
    r1 = finished(acc1, zeros, total, head_scale, 1, NVFP4)
    r2 = finished(acc2, zeros, total, head_scale, 2, NVFP4)
    r3 = finished(acc3, zeros, total, head_scale, 3, NVFP4)
    store_columns(out_ptr, at_row, is_row, r0, r1, r2, r3, channel, STEP)


def token_prefill(
    q: Tensor,
    keys: TokenPages,
    values: TokenPages,
    block_table: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor,
) -> None:
    """Write the tiles' tokens of `out`; arguments as in the file's docstring."""
    _, heads, dim = q.shape
    kv_heads, page = keys.words.shape[1:3]
    group = triton.next_power_of_2(heads // kv_heads)
    tokens = max(1, QUERIES // group)
    _attend_tiles[(kv_heads, TILE // tokens, len(tiles))](
        q, keys.words, values.words, *scale_bytes(keys, values), keys.head_scale, values.head_scale,
        block_table, tiles, sinks, out, scale * LOG2_E, softcap * LOG2_E, window, block_table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, GROUP=group, TOKENS=tokens, DIM=dim, PAGE=page, BLOCK=BLOCK,
        NVFP4=keys.is_nvfp4, SOFTCAP=softcap > 0, WINDOW=window > 0, SINKS=sinks is not None,
        ASM=compute_capability(q.device) >= (8, 0), num_warps=4, num_stages=2,
    )  # fmt: skip
