"""Decode attention over paged KV, split-KV (flash-decoding), merged in a fixed order; Triton.

Each request has one query token. Prefill and formats with several values in a byte are not handled.

    q            [B, H, D]            bf16, fp16 or fp32
    key_pages    [P, H_kv, page, D]   q's dtype, or float8_e4m3fn, or int8; value_pages alike
    block_table  int32 [B, pages]     page numbers in the order of the context
    lengths      int32 [B]            tokens of context, the current one included; 0 gives a row of zeros
    *_scale      None; fp32 [H_kv] for e4m3, one a head; fp32 [P, H_kv, page] for int8, one a token and head
    out          [B, H, D]            q's dtype

A program handles one (request, kv head, run of splits) with all the G = H / H_kv query heads of the group, so
K and V are read and decoded once. Splits are counted from the start of the context, and their size depends on
that request's length alone. A request's bits therefore do not depend on the other requests in its batch
(pegainfer #438). Short contexts are split finer, because a program for a short context spends its time
waiting for one tile after another. Eight-bit pages are not split finer: their programs need long runs of
tiles to keep loads in flight. Scales are never applied to the pages: K's scale multiplies the scores, V's the
probabilities (int8) or the result (e4m3).

A request of L tokens reads 2 * L * H_kv * D * itemsize bytes, each byte once; partial sums add H * D * 4 * 2
/ split. At G = 4, D = 128, split = 512 that is 3% in bf16. The least possible time is the number of bytes
divided by the bandwidth of a copy.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability
from ..hadamard import log2, rotate
from ..triton_imports import tl, triton
from .options import AttentionOptions


def decode_attention_reference(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Compute the kernel's result in fp64, one request at a time; the file's docstring has the shapes."""
    sinks, softcap = options.sinks, options.softcap
    batch, heads, head_dim = q.shape
    kv_heads = key_pages.shape[1]
    out = torch.zeros(batch, heads, head_dim, dtype=torch.float64, device=q.device)
    for row in range(batch):
        length = int(lengths[row])
        if length == 0:
            continue
        pages = block_table[row, : triton.cdiv(length, key_pages.shape[2])].long()
        keys = _gather(key_pages, options.key_scale, pages)[:, :length]
        values = _gather(value_pages, options.value_scale, pages)[:, :length]
        if options.sliding_window:
            keys, values = (x[:, -options.sliding_window :] for x in (keys, values))
        query = q[row].double().view(kv_heads, heads // kv_heads, head_dim)
        scores = torch.einsum("hgd,htd->hgt", query, keys) * options.scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.reshape(heads, -1)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().unsqueeze(-1)], dim=-1)
        probabilities = scores.softmax(dim=-1)[:, : keys.shape[1]].view(kv_heads, heads // kv_heads, -1)
        out[row] = torch.einsum("hgt,htd->hgd", probabilities, values).reshape(heads, head_dim)
    return out


def _gather(pages_of: Tensor, scale: Tensor | None, pages: Tensor) -> Tensor:
    """Return the context's keys or values [H_kv, tokens, D] in fp64, with scales applied."""
    values = pages_of[pages].double()
    if scale is not None:
        by_token = scale.ndim == 3
        values *= scale[pages].double().unsqueeze(-1) if by_token else scale.double().view(1, -1, 1, 1)
    return values.transpose(0, 1).flatten(1, 2)


# Two tokens at once, an int16 pair of bytes each: pick the two low (or high) bytes and widen them.
_E4M3_LOW = tl.constexpr("{.reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x0020; "
                         "mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;}")  # fmt: skip
_E4M3_HIGH = tl.constexpr("{.reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x0031; "
                          "mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;}")  # fmt: skip
# 0x64 over a byte u is 1024 + u in fp16; u is the value plus 128, so 1152 goes back off, exactly.
_INT8_LOW = tl.constexpr("{.reg .b32 t, c; xor.b32 t, $1, 0x80808080; prmt.b32 t, t, 0x64646464, 0x4240; "
                         "mov.b32 c, 0x64806480; sub.f16x2 $0, t, c;}")  # fmt: skip
_INT8_HIGH = tl.constexpr("{.reg .b32 t, c; xor.b32 t, $1, 0x80808080; prmt.b32 t, t, 0x64646464, 0x4341; "
                          "mov.b32 c, 0x64806480; sub.f16x2 $0, t, c;}")  # fmt: skip


@triton.jit
def _decode_byte(pairs, HIGH: tl.constexpr, SCALES: tl.constexpr, ASM: tl.constexpr):
    """Return the low (even d) or high (odd d) bytes of int16 `pairs` as fp16: exact for e4m3 and int8."""
    if ASM:
        low: tl.constexpr = _E4M3_LOW if SCALES == 1 else _INT8_LOW
        high: tl.constexpr = _E4M3_HIGH if SCALES == 1 else _INT8_HIGH
        return tl.inline_asm_elementwise(
            high if HIGH else low, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
    byte = (pairs >> 8).to(tl.int8) if HIGH else pairs.to(tl.int8)
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16) if SCALES == 1 else byte.to(tl.float16)


@triton.jit
def _split_tokens(length, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tokens in a split of a context: a tile up to four tiles, two up to eight, SPLIT beyond."""
    return tl.where(length <= 4 * BLOCK, BLOCK, tl.where(length <= 8 * BLOCK, 2 * BLOCK, SPLIT))


@triton.jit
def _is_only_split(length, first_token, split_tokens, SINKS: tl.constexpr):
    """Say whether no merge is needed; with sinks, a merge is always needed."""
    return (length > 0) & ((length - 1) // split_tokens == first_token // split_tokens) & (not SINKS)


@triton.jit
def _pages_of(table_ptr, block, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the one or two pages that the tile at token `block` lies in; page 0 past the end.

    The page numbers are loaded as two scalars: a load of a tensor would be pipelined like keys and values,
    and take buffers from them.
    """
    page = tl.load(table_ptr + block // PAGE, mask=block < end, other=0)
    second_page = page
    if BLOCK > PAGE:
        second_page = tl.load(table_ptr + block // PAGE + 1, mask=block + PAGE < end, other=0)
    return page, second_page


@triton.jit
def _slots(
    page, second_page, block, in_block, kv_head,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the row offsets, in rows of D, of the tile's tokens."""
    slot = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE
    if BLOCK > PAGE:
        second = (second_page.to(tl.int64) * KV_HEADS + kv_head) * PAGE
        return tl.where(in_block < PAGE, slot, second) + in_block % PAGE
    return slot + block % PAGE + in_block


class Form(NamedTuple):
    """Compile-time parameters of `_attend_splits`. The class is a tuple because Triton looks kernels up by
    it, and a tuple is cheap to hash.

    dim:          head_dim as a power of two
    group:        query heads of a kv head, as a power of two, at least 16
    split, block: tokens in a split of a long context, and keys that are read at a time
    fine: whether short contexts are split finer
    scales:       0 for none, 1 for one per head (e4m3), 2 for one per token and head (int8)
    """

    heads: int
    kv_heads: int
    head_dim: int
    dim: int
    group: int
    page: int
    split: int
    block: int
    fine: bool
    scales: int
    softcap: bool
    window: bool
    sinks: bool
    asm: bool
    pdl: bool
    precision: str


@triton.jit(do_not_specialize=["table_stride", "max_splits", "window"])
def _attend_splits(
    q_ptr, key_ptr, value_ptr, block_table_ptr, lengths_ptr, key_scale_ptr, value_scale_ptr,
    partial_ptr, lse_ptr, out_ptr,
    scale_log2, softcap, window, table_stride, max_splits, FORM: tl.constexpr,
):  # fmt: skip
    """Compute partial softmax sums of the splits that this program handles: every `num_programs(0)`-th. If
    there is only one split, write the result.

    Eight-bit pages are read as int16 pairs of neighbouring d, and even and odd d are multiplied separately:
    the matrix units need two *tokens* in a register, and the load that transposes handles 16-bit values only.
    """
    GROUP: tl.constexpr = FORM.group
    EIGHT_BIT: tl.constexpr = FORM.scales != 0
    ROW: tl.constexpr = FORM.head_dim // 2 if EIGHT_BIT else FORM.head_dim
    COLUMNS: tl.constexpr = FORM.dim // 2 if EIGHT_BIT else FORM.dim
    STEP: tl.constexpr = 2 if EIGHT_BIT else 1
    if FORM.pdl:
        # The merge may take its place on the device while this runs; it waits for what is stored here.
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(2)
    kv_head = tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    first_token = 0
    if FORM.window:
        first_token = tl.maximum(length - window, 0)

    table_ptr = block_table_ptr + row * table_stride
    in_block = tl.arange(0, FORM.block)
    group = tl.arange(0, GROUP)
    column = tl.arange(0, COLUMNS)
    head = kv_head * (FORM.heads // FORM.kv_heads) + group
    is_head = group < FORM.heads // FORM.kv_heads
    is_column = column < ROW
    in_q = is_head[:, None] & is_column[None, :]
    q_at = q_ptr + (row * FORM.heads + head[:, None]) * FORM.head_dim + column[None, :] * STEP
    q = tl.load(q_at, mask=in_q, other=0.0)
    q_odd = q
    key_scale = 1.0
    value_scale = 1.0
    if EIGHT_BIT:
        q = q.to(tl.float16)
        q_odd = tl.load(q_at + 1, mask=in_q, other=0.0).to(tl.float16)
    if FORM.scales == 1:
        key_scale = tl.load(key_scale_ptr + kv_head)
        value_scale = tl.load(value_scale_ptr + kv_head)

    split_tokens = _split_tokens(length, FORM.split, FORM.block) if FORM.fine else FORM.split
    split = first_token // split_tokens + tl.program_id(0)
    while split * split_tokens < length:
        start = split * split_tokens
        end = tl.minimum(start + split_tokens, length)
        largest = tl.full([GROUP], -float("inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        acc = tl.zeros([GROUP, COLUMNS], tl.float32)
        acc_odd = tl.zeros([GROUP, COLUMNS], tl.float32)
        first_block = tl.maximum(start, first_token // FORM.block * FORM.block)
        page, second_page = _pages_of(table_ptr, first_block, end, FORM.page, FORM.block)
        for block in range(first_block, end, FORM.block):
            token = block + in_block
            valid = (token < end) & (token >= first_token)
            slot = _slots(page, second_page, block, in_block, kv_head, FORM.kv_heads, FORM.page, FORM.block)
            # A tile ahead, so that no load of keys or values waits for the table.
            page, second_page = _pages_of(table_ptr, block + FORM.block, end, FORM.page, FORM.block)
            where = slot[:, None] * ROW + column[None, :]
            keep = valid[:, None] & is_column[None, :]
            key = tl.load(key_ptr + where, mask=keep, other=0.0, eviction_policy="evict_first")
            value = tl.load(value_ptr + where, mask=keep, other=0.0, eviction_policy="evict_first")
            if EIGHT_BIT:
                scores = tl.dot(q, _decode_byte(key, False, FORM.scales, FORM.asm).T)
                scores = tl.dot(q_odd, _decode_byte(key, True, FORM.scales, FORM.asm).T, scores)
            else:
                scores = tl.dot(q, key.T, input_precision=FORM.precision)
            scores *= scale_log2 * key_scale
            if FORM.scales == 2:
                scores *= tl.load(key_scale_ptr + slot, mask=valid, other=0.0)[None, :]
            if FORM.softcap:
                # tanh(x) = 1 - 2 / (exp(2x) + 1); scores carry a factor log2(e), and so does softcap.
                scores = softcap - 2.0 * softcap / (
                    tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap)) + 1.0
                )
            scores = tl.where(valid[None, :], scores, -float("inf"))
            new_largest = tl.maximum(largest, tl.max(scores, axis=1))
            rescale = tl.exp2(largest - new_largest)
            probability = tl.exp2(scores - new_largest[:, None])
            total = total * rescale + tl.sum(probability, axis=1)
            if FORM.scales == 2:
                probability *= tl.load(value_scale_ptr + slot, mask=valid, other=0.0)[None, :]
            probability = probability.to(q.dtype)
            if EIGHT_BIT:
                even = _decode_byte(value, False, FORM.scales, FORM.asm)
                acc = tl.dot(probability, even, acc * rescale[:, None])
                odd = _decode_byte(value, True, FORM.scales, FORM.asm)
                acc_odd = tl.dot(probability, odd, acc_odd * rescale[:, None])
            else:
                acc = tl.dot(probability, value, acc * rescale[:, None], input_precision=FORM.precision)
            largest = new_largest
        result = acc * (value_scale / total)[:, None]
        result_odd = acc_odd * (value_scale / total)[:, None]
        if _is_only_split(length, first_token, split_tokens, FORM.sinks):
            out_at = out_ptr + (row * FORM.heads + head[:, None]) * FORM.head_dim + column[None, :] * STEP
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=in_q)
            if EIGHT_BIT:
                tl.store(out_at + 1, result_odd.to(out_ptr.dtype.element_ty), mask=in_q)
        else:
            at = (row * FORM.heads + head) * max_splits + split
            tl.store(lse_ptr + at, largest + tl.log2(total), mask=is_head)
            partial_at = partial_ptr + at[:, None] * FORM.head_dim + column[None, :] * STEP
            tl.store(partial_at, result, mask=in_q)
            if EIGHT_BIT:
                tl.store(partial_at + 1, result_odd, mask=in_q)
        split += tl.num_programs(0)


@triton.jit
def add_splits(
    acc, largest, total, first, end, at, partial_ptr, lse_ptr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Return acc [D] with the splits first .. end added, and the largest score and the total weight of the
    sum.

    Splits are always added in the same order and grouping. at: where the head's splits begin
    """
    dim = tl.arange(0, DIM)
    for some in range(first, end, SPLITS_AT_ONCE):
        split = some + tl.arange(0, SPLITS_AT_ONCE)
        valid = split < end
        lse = tl.load(lse_ptr + at + split, mask=valid, other=-float("inf"))
        partial = tl.load(
            partial_ptr + (at + split)[:, None] * HEAD_DIM + dim[None, :],
            mask=valid[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(lse, axis=0))
        rescale = tl.exp2(largest - new_largest)
        weight = tl.exp2(lse - new_largest)
        total = total * rescale + tl.sum(weight, axis=0)
        acc = acc * rescale + tl.sum(partial * weight[:, None], axis=0)
        largest = new_largest
    return acc, largest, total


@triton.jit(do_not_specialize=["window", "max_splits"])
def _merge_splits(
    partial_ptr, lse_ptr, lengths_ptr, sinks_ptr, out_ptr, window, max_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    FINE: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    ROTATED: tl.constexpr, LOG_DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add a head's splits, always in the order of the context and in the same grouping.

    ROTATED: the splits hold rotated values, so the result has to be rotated back, even that of a single split
    """
    if PDL:
        # What comes next may fetch its weights meanwhile, and waits itself.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    head = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    first_token = 0
    if WINDOW:
        first_token = tl.maximum(length - window, 0)
    split_tokens = _split_tokens(length, SPLIT, BLOCK) if FINE else SPLIT
    if _is_only_split(length, first_token, split_tokens, SINKS or ROTATED):
        return
    first_split = first_token // split_tokens
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    largest = -float("inf")
    total = 0.0
    if SINKS:
        largest = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    acc = tl.zeros([DIM], tl.float32)
    acc, largest, total = add_splits(
        acc, largest, total, first_split, tl.cdiv(length, split_tokens), (row * HEADS + head) * max_splits,
        partial_ptr, lse_ptr, HEAD_DIM, DIM, SPLITS_AT_ONCE,
    )  # fmt: skip
    out = tl.where(total > 0, acc / total, 0.0)
    if ROTATED:
        out = tl.reshape(rotate(tl.reshape(out, [1, DIM]), 1, DIM, LOG_DIM), [DIM])
    tl.store(out_ptr + (row * HEADS + head) * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=is_dim)


SHORT_SPLITS = 4
"""Of a context of at most eight tiles, at most."""


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch for partial sums, allocated once for the largest batch and context.

    partial: fp32 [B, H, splits, D]
    lse:     fp32 [B, H, splits], in log2
    """

    partial: Tensor
    lse: Tensor
    split_tokens: int

    @classmethod
    def allocate(
        cls,
        max_batch: int,
        heads: int,
        head_dim: int,
        max_context: int,
        device: torch.device | str,
        further_splits: int = 0,
    ) -> "DecodeWorkspace":
        """further_splits: splits that another rule adds to those of `_split_tokens`"""
        split_tokens = decode_split_tokens(max_context)
        splits = max(SHORT_SPLITS, triton.cdiv(max_context, split_tokens)) + further_splits
        partial = torch.empty(max_batch, heads, splits, head_dim, dtype=torch.float32, device=device)
        lse = torch.empty(max_batch, heads, splits, dtype=torch.float32, device=device)
        return cls(partial, lse, split_tokens)

    @property
    def max_splits(self) -> int:
        return self.partial.shape[2]


def decode_split_tokens(max_context: int) -> int:
    """Return the number of tokens in a split of a long context. The number follows from the longest context
    that the engine admits, never from the running batch.

    At most 64 splits keep the merge short; at least 256 tokens per split keep partial sums under 6% of the
    traffic at four query heads a group.
    """
    return max(256, triton.next_power_of_2(triton.cdiv(max_context, 64)))


PROGRAMS_WANTED = 132 * 16
"""Programs that fill a large GPU with room for uneven contexts; beyond that, one takes several splits."""

TILE_BYTES = 16384
"""Of keys, and as much of values: with two of each in flight, three programs share an SM."""


def decode_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    workspace: DecodeWorkspace,
    options: AttentionOptions,
    out: Tensor | None = None,
) -> Tensor:
    """Launch the two kernels; arguments are as in the file's docstring.

    The kernels compile once for given head counts, page size and KV dtype, and specialize on no running size.
    """
    batch, heads, head_dim = q.shape
    kv_heads, page = key_pages.shape[1], key_pages.shape[2]
    out = torch.empty_like(q) if out is None else out
    dim = triton.next_power_of_2(head_dim)
    splits = min(workspace.max_splits, max(1, triton.cdiv(PROGRAMS_WANTED, batch * kv_heads)))
    itemsize = key_pages.element_size()
    if itemsize == 1:
        key_pages, value_pages = key_pages.view(torch.int16), value_pages.view(torch.int16)
    tile = min(TILE_BYTES // (dim * itemsize), 128, 2 * page)
    fine = itemsize > 1
    pdl = compute_capability(q.device) >= (9, 0)
    form = Form(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dim=dim,
        group=max(16, triton.next_power_of_2(heads // kv_heads)),
        page=page,
        split=workspace.split_tokens,
        block=tile,
        fine=fine,
        scales=options.scales,
        softcap=bool(options.softcap),
        window=options.window > 0,
        sinks=options.sinks is not None,
        asm=compute_capability(q.device) >= (8, 9),
        pdl=pdl,
        precision="tf32x3" if q.element_size() == 4 else "tf32",
    )
    _attend_splits[(splits, kv_heads, batch)](
        q, key_pages, value_pages, block_table, lengths, options.key_scale, options.value_scale,
        workspace.partial, workspace.lse, out,
        options.scale_log2, options.softcap_log2, options.window, block_table.stride(0),
        workspace.max_splits, form, num_warps=4, num_stages=3,
    )  # fmt: skip
    merge_splits(workspace, lengths, options, out, block=tile, fine=fine)
    return out


def merge_splits(
    workspace: DecodeWorkspace,
    lengths: Tensor,
    options: AttentionOptions,
    out: Tensor,
    *,
    block: int,
    fine: bool = True,
    is_rotated: bool = False,
) -> None:
    """Launch the second kernel: it merges the partial sums of the splits in the workspace into `out` [B, H,
    D].

    block:      number of tokens in the shortest split of a short context
    fine: whether short contexts have shorter splits than long ones
    is_rotated: whether the splits hold rotated values
    """
    batch, heads, head_dim = out.shape
    dim = triton.next_power_of_2(head_dim)
    pdl = compute_capability(out.device) >= (9, 0)
    _merge_splits[(heads, batch)](
        workspace.partial, workspace.lse, lengths, options.sinks, out, options.window, workspace.max_splits,
        HEADS=heads, HEAD_DIM=head_dim, DIM=dim, SPLIT=workspace.split_tokens, BLOCK=block,
        FINE=fine, SPLITS_AT_ONCE=8, SINKS=options.sinks is not None,
        WINDOW=options.window > 0, ROTATED=is_rotated,
        LOG_DIM=log2(dim), PDL=pdl, num_warps=1 if dim <= 128 else 2, launch_pdl=pdl,
    )  # fmt: skip
