"""Decode attention over pages of int4 or NVFP4 tokens, split-KV; Triton.

    q            [B, H, D]          rotated where the pages are (fp16), else any float dtype
    keys, values TokenPages         as in `store.py`
    out          [B, H, D]          rotated back where the pages are rotated

Block table, lengths, splits, workspace and merge are as in `../decode.py`; D is a power of two.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...device import compute_capability
from ...triton_imports import tl, triton
from ..coded.softmax import load_columns, programs_of_splits, store_columns
from ..decode import DecodeWorkspace, _is_only_split, _pages_of, _slots, _split_tokens, merge_splits
from ..options import AttentionOptions
from .block import attend_block, finished, first_channels, prepared
from .store import TokenPages

BLOCK, NVFP4_BLOCK = 64, 32
REGISTERS = 128
"""Of a thread of the one warp that is a program: sixteen share an SM."""


class Form(NamedTuple):
    """Compile-time parameters of `_attend_splits`; block: tokens per block; merged: whether a single split is
    merged too.

    group: query heads of a kv head, as a power of two, 8 at least
    split: tokens of a long context's split
    """

    heads: int
    kv_heads: int
    group: int
    dim: int
    page: int
    split: int
    block: int
    nvfp4: bool
    softcap: bool
    window: bool
    merged: bool
    asm: bool
    pdl: bool


@triton.jit(do_not_specialize=["table_stride", "max_splits", "window"])
def _attend_splits(
    q_ptr, words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr, head_scale_k_ptr, head_scale_v_ptr,
    block_table_ptr, lengths_ptr, partial_ptr, lse_ptr, out_ptr,
    scale_log2, softcap, window, table_stride, max_splits, FORM: tl.constexpr,
):  # fmt: skip
    """Compute partial softmax sums of every `num_programs(0)`-th split. If there is only one split and it is
    not merged, write the result.
    """
    GROUP: tl.constexpr = FORM.group
    if FORM.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = FORM.dim // 4
    STEP: tl.constexpr = FORM.dim // 16 if FORM.nvfp4 else WIDTH
    channel = first_channels(FORM.dim, FORM.nvfp4)
    request = tl.program_id(2)
    kv_head = tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    first_token = 0
    if FORM.window:
        first_token = tl.maximum(length - window, 0)
    table_ptr = block_table_ptr + request * table_stride
    group = tl.arange(0, GROUP)
    is_head = group < FORM.heads // FORM.kv_heads
    head = request * FORM.heads + kv_head * (FORM.heads // FORM.kv_heads) + group
    q0, q1, q2, q3 = load_columns(q_ptr, head.to(tl.int64) * FORM.dim, is_head, channel, STEP)
    q0, q1, q2, q3, q_sum = prepared(q0, q1, q2, q3, FORM.nvfp4)
    head_scale = 1.0
    if FORM.nvfp4:
        scale_log2 *= tl.load(head_scale_k_ptr + kv_head)
        head_scale = tl.load(head_scale_v_ptr + kv_head)
    in_block = tl.arange(0, FORM.block)
    split_tokens = _split_tokens(length, FORM.split, FORM.block)
    split = first_token // split_tokens + tl.program_id(0)
    while split * split_tokens < length:
        start = split * split_tokens
        end = tl.minimum(start + split_tokens, length)
        largest = tl.full([GROUP], -float("inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        zeros = tl.zeros([GROUP], tl.float32)
        acc0 = tl.zeros([WIDTH, GROUP], tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        first_block = tl.maximum(start, first_token // FORM.block * FORM.block)
        page, second_page = _pages_of(table_ptr, first_block, end, FORM.page, FORM.block)
        for block in range(first_block, end, FORM.block):
            token = block + in_block
            valid = (token < end) & (token >= first_token)
            slot = _slots(page, second_page, block, in_block, kv_head, FORM.kv_heads, FORM.page, FORM.block)
            # A block ahead, so that no load of codes waits for the table.
            page, second_page = _pages_of(table_ptr, block + FORM.block, end, FORM.page, FORM.block)
            acc0, acc1, acc2, acc3, zeros, largest, total = attend_block(
                (q0, q1, q2, q3), q_sum, (acc0, acc1, acc2, acc3), zeros, largest, total,
                slot, valid, valid[:, None], words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr,
                scale_log2, softcap, FORM.nvfp4, FORM.dim, FORM.softcap, FORM.asm,
            )  # fmt: skip
        r0 = finished(acc0, zeros, total, head_scale, 0, FORM.nvfp4)
        r1 = finished(acc1, zeros, total, head_scale, 1, FORM.nvfp4)
        r2 = finished(acc2, zeros, total, head_scale, 2, FORM.nvfp4)
        r3 = finished(acc3, zeros, total, head_scale, 3, FORM.nvfp4)
        if _is_only_split(length, first_token, split_tokens, FORM.merged):
            store_columns(out_ptr, head.to(tl.int64) * FORM.dim, is_head, r0, r1, r2, r3, channel, STEP)
        else:
            at = head * max_splits + split
            tl.store(lse_ptr + at, largest + tl.log2(total), mask=is_head)
            store_columns(partial_ptr, at.to(tl.int64) * FORM.dim, is_head, r0, r1, r2, r3, channel, STEP)
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
    options: AttentionOptions,
    out: Tensor,
) -> None:
    """Write `out`; arguments are as in the file's docstring."""
    batch, heads, dim = q.shape
    kv_heads, page = keys.words.shape[1:3]
    splits = programs_of_splits(workspace.max_splits, batch * kv_heads)
    capability = compute_capability(q.device)
    # Half as many tokens at a time want another block of them in flight.
    block, stages = (NVFP4_BLOCK, 3) if keys.is_nvfp4 else (BLOCK, 2)
    block = min(block, 2 * page)
    form = Form(
        heads=heads,
        kv_heads=kv_heads,
        group=max(8, triton.next_power_of_2(heads // kv_heads)),
        dim=dim,
        page=page,
        split=workspace.split_tokens,
        block=block,
        nvfp4=keys.is_nvfp4,
        softcap=bool(options.softcap),
        window=options.window > 0,
        merged=rotated or options.sinks is not None,
        asm=capability >= (8, 0),
        pdl=capability >= (9, 0),
    )
    _attend_splits[(splits, kv_heads, batch)](
        q, keys.words, values.words, *scale_bytes(keys, values), keys.head_scale, values.head_scale,
        block_table, lengths, workspace.partial, workspace.lse, out,
        options.scale_log2, options.softcap_log2, options.window, block_table.stride(0),
        workspace.max_splits, form,
        num_warps=1, num_stages=stages, maxnreg=REGISTERS if dim <= 128 else None,
    )  # fmt: skip
    merge_splits(workspace, lengths, options, out, block=block, is_rotated=rotated)


def scale_bytes(keys: TokenPages, values: TokenPages) -> tuple[Tensor, Tensor]:
    """Load both scales for kernels, at once for all channels of a thread."""
    scales = keys.scales
    both = torch.int32
    if keys.is_nvfp4:
        both = {64: torch.int8, 128: torch.int16, 256: torch.int32}[16 * scales.shape[-1]]
    return scales.view(both), values.scales.view(both)
