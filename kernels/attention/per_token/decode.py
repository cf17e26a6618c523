"""Decode attention over pages of int4 or NVFP4 tokens, split-KV; Triton.

    q            [B, H, D]          rotated where the pages are (fp16), else any float dtype
    keys, values TokenPages         as in `token_store.py`
    out          [B, H, D]          rotated back where the pages are rotated

Block table, lengths, splits, workspace and merge are those of `decode_attention.py`; D is a power of two.
"""

import torch
from torch import Tensor

from ...device import compute_capability
from ...triton_imports import tl, triton
from ..coded.softmax import load_columns, programs_of_splits, store_columns
from ..decode import LOG2_E, DecodeWorkspace, _is_only_split, _pages_of, _slots, _split_tokens, merge_splits
from .block import attend_block, finished, first_channels, prepared
from .store import TokenPages

BLOCK, NVFP4_BLOCK = 64, 32
REGISTERS = 128
"""Of a thread of the one warp that is a program: sixteen share an SM."""


@triton.jit(do_not_specialize=["table_stride", "max_splits", "window"])
def _attend_splits(
    q_ptr, words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr, head_scale_k_ptr, head_scale_v_ptr,
    block_table_ptr, lengths_ptr, partial_ptr, lse_ptr, out_ptr,
    scale_log2, softcap, window, table_stride, max_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, NVFP4: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, MERGED: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Partial softmax sums of every `num_programs(0)`-th split; of an only one, unless MERGED, the result."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = DIM // 4
    STEP: tl.constexpr = DIM // 16 if NVFP4 else WIDTH
    channel = first_channels(DIM, NVFP4)
    request = tl.program_id(2)
    kv_head = tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    first_token = 0
    if WINDOW:
        first_token = tl.maximum(length - window, 0)
    table_ptr = block_table_ptr + request * table_stride
    group = tl.arange(0, GROUP)
    is_head = group < HEADS // KV_HEADS
    head = request * HEADS + kv_head * (HEADS // KV_HEADS) + group
    q0, q1, q2, q3 = load_columns(q_ptr, head.to(tl.int64) * DIM, is_head, channel, STEP)
    q0, q1, q2, q3, q_sum = prepared(q0, q1, q2, q3, NVFP4)
    head_scale = 1.0
    if NVFP4:
        scale_log2 *= tl.load(head_scale_k_ptr + kv_head)
        head_scale = tl.load(head_scale_v_ptr + kv_head)
    in_block = tl.arange(0, BLOCK)
    split_tokens = _split_tokens(length, SPLIT, BLOCK)
    split = first_token // split_tokens + tl.program_id(0)
    while split * split_tokens < length:
        start = split * split_tokens
        end = tl.minimum(start + split_tokens, length)
        largest = tl.full([GROUP], -float("inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        zeros = tl.zeros([GROUP], tl.float32)
        acc0 = tl.zeros([WIDTH, GROUP], tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        first_block = tl.maximum(start, first_token // BLOCK * BLOCK)
        page, second_page = _pages_of(table_ptr, first_block, end, PAGE, BLOCK)
        for block in range(first_block, end, BLOCK):
            token = block + in_block
            valid = (token < end) & (token >= first_token)
            slot = _slots(page, second_page, block, in_block, kv_head, KV_HEADS, PAGE, BLOCK)
            # A block ahead, so that no load of codes waits for the table.
            page, second_page = _pages_of(table_ptr, block + BLOCK, end, PAGE, BLOCK)
            acc0, acc1, acc2, acc3, zeros, largest, total = attend_block(
                q0, q1, q2, q3, q_sum, acc0, acc1, acc2, acc3, zeros, largest, total,
                slot, valid, valid[:, None], words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr,
                scale_log2, softcap, NVFP4, DIM, SOFTCAP, ASM,
            )  # fmt: skip
        r0 = finished(acc0, zeros, total, head_scale, 0, NVFP4)
        r1 = finished(acc1, zeros, total, head_scale, 1, NVFP4)
        r2 = finished(acc2, zeros, total, head_scale, 2, NVFP4)
        r3 = finished(acc3, zeros, total, head_scale, 3, NVFP4)
        if _is_only_split(length, first_token, split_tokens, MERGED):
            store_columns(out_ptr, head.to(tl.int64) * DIM, is_head, r0, r1, r2, r3, channel, STEP)
        else:
            at = head * max_splits + split
            tl.store(lse_ptr + at, largest + tl.log2(total), mask=is_head)
            store_columns(partial_ptr, at.to(tl.int64) * DIM, is_head, r0, r1, r2, r3, channel, STEP)
        split += tl.num_programs(0)


def token_decode(
    q: Tensor,
    keys: TokenPages,
    values: TokenPages,
    block_table: Tensor,
    lengths: Tensor,
    workspace: DecodeWorkspace,
    *,
    rotated: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor,
) -> None:
    """Write `out`; arguments as in the file's docstring, options as in `decode_attention.py`."""
    batch, heads, dim = q.shape
    kv_heads, page = keys.words.shape[1:3]
    splits = programs_of_splits(workspace.max_splits, batch * kv_heads)
    capability = compute_capability(q.device)
    # Half as many tokens at a time want another block of them in flight.
    block, stages = (NVFP4_BLOCK, 3) if keys.is_nvfp4 else (BLOCK, 2)
    block = min(block, 2 * page)
    _attend_splits[(splits, kv_heads, batch)](
        q, keys.words, values.words, *scale_bytes(keys, values), keys.head_scale, values.head_scale,
        block_table, lengths, workspace.partial, workspace.lse, out,
        scale * LOG2_E, softcap * LOG2_E, window, block_table.stride(0), workspace.max_splits,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=max(8, triton.next_power_of_2(heads // kv_heads)), DIM=dim,
        PAGE=page, SPLIT=workspace.split_tokens, BLOCK=block, NVFP4=keys.is_nvfp4, SOFTCAP=softcap > 0,
        WINDOW=window > 0, MERGED=rotated or sinks is not None, ASM=capability >= (8, 0),
        PDL=capability >= (9, 0), num_warps=1, num_stages=stages, maxnreg=REGISTERS if dim <= 128 else None,
    )  # fmt: skip
    merge_splits(workspace, lengths, sinks, out, block=block, window=window, is_rotated=rotated)


def scale_bytes(keys: TokenPages, values: TokenPages) -> tuple[Tensor, Tensor]:
    """Both scales as kernels read them, all at once that a thread needs of a token."""
    scales = keys.scales
    both = torch.int32
    if keys.is_nvfp4:
        both = {64: torch.int8, 128: torch.int16, 256: torch.int32}[16 * scales.shape[-1]]
    return scales.view(both), values.scales.view(both)
