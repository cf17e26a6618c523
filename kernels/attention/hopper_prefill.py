"""Prefill attention on Hopper over paged keys of 16 bits or e4m3, values of 16: TMA, wgmma, Gluon.

The kernel computes the attention of `prefill.py` on FlashAttention-3's schedule (Shah et al., 2024):

    producer warp     TMA: blocks of keys and of values, a page at a time --> two rings in shared memory
                      (`hopper_prefill_loads.py`)
    two warpgroups    64 rows of queries each, all query heads of a few tokens. The products of block i's keys
                      and of block i - 1's values are issued together; while the tensor cores compute them for
                      one warpgroup, the other one takes its softmax (ping-pong: named barriers pass the turn)

    q            [T, H, D]            bf16 or fp16; D 64, 128 or 256
    value_pages  [P, H_kv, page, D]   bf16 or fp16, contiguous
    key_pages    [P, H_kv, page, D]   of the same dtype; or e4m3 [P', H_kv, page, D], where they are stored
    *_scale      None, or fp32 [H_kv]
    block_table, tiles, out           as in `prefill.py`
    key_table    int32 [R, pages]     block_table of e4m3 keys

The kernel is persistent: the program of each SM handles one item (`hopper_prefill_items.py`) per round, the
longest first, and loads an item's first blocks while it finishes the previous item.

With e4m3 keys, queries are rounded to e4m3 too, with one scale a token and head (`e4m3_queries.py`) that
multiplies the scores. With e4m3 keys, the product of queries and keys takes half the time, and a key takes
half the bytes. Hopper accumulates products of e4m3 with about 14 bits, which loses less than rounding the
operands does. Values stay 16
bits: wgmma reads 8-bit operands only along the sum, and values lie across the sum.

A token's bits depend only on its own context, but differ from those of `prefill.py`, whose blocks are
shorter. Decoding is left to other kernels; stored int8 is widened first in a large step (`widen_pages.py`).
"""

import functools

import torch
from torch import Tensor

from ..hopper.packed_operand import x_layout
from ..triton_imports import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .e4m3_queries import LEAST
from .hopper_prefill_items import ROWS, Form, Items
from .hopper_prefill_loads import Ring, phase_of, producer_partition, slot_of
from .options import AttentionOptions

OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""A thread's registers before the producer gives most of its own to the two warpgroups."""
LEAST_LARGEST = gl.constexpr(LEAST)
E4M3_SLOTS = 3
"""Of keys and of values, where e4m3 keys leave room and the time for a load is shorter."""


@gluon.constexpr_function
def turn_asm(instruction, which):
    """Return PTX for a turn between the warpgroups, at named barriers 8 and 9, which Triton does not use."""
    return f"bar.{instruction} {8 + which}, 256; mov.u32 $0, $1;"


@gluon.jit
def take_turn(WHICH: gl.constexpr):
    """Wait until the other warpgroup has passed the turn to issue products."""
    gl.inline_asm_elementwise(turn_asm("sync", WHICH), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(TO: gl.constexpr):
    gl.inline_asm_elementwise(turn_asm("arrive", TO), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def accumulator_layout(columns, depth=16):
    """depth: how many numbers one instruction reads along the sum; together they have 32 bytes"""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth])


@gluon.constexpr_function
def score_layout(T):
    return accumulator_layout(T.block, 32 if T.e4m3_keys else 16)


@gluon.constexpr_function
def copy_layout(dim):
    """16 bytes a thread."""
    across = min(dim // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def softmax_step(
    products, largest, total, block, position, factor, softcap, item, window,
    MASKED: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Return a block's probabilities, the largest score times log2(e), the sum, and the factor for the sum of
    earlier values. factor: of all scores, or [ROWS] of each row's"""
    scores = products
    by_score = factor
    if T.e4m3_keys:
        by_score = factor[:, None]
    if T.softcap:
        # tanh(x) = 1 - 2 / (exp(2x) + 1); scores carry a factor log2(e), and so does softcap.
        twice = by_score * 2.8853900817779268 / softcap
        scores = softcap - 2.0 * softcap / (gl.exp2(products * twice) + 1.0)
        factor = 1.0
        by_score = 1.0
    if MASKED:
        columns: gl.constexpr = gl.SliceLayout(0, products.type.layout)
        token = (item.first_block + block) * T.block + gl.arange(0, T.block, columns)
        visible = (token[None, :] <= position[:, None]) & (token < item.end)[None, :]
        if T.window:
            visible = visible & (token[None, :] > position[:, None] - window)
        scores = gl.where(visible, scores, -float("inf"))
    new_largest = gl.maximum(largest, gl.max(scores, axis=1) * factor)
    pivot = new_largest
    if MASKED:
        # A row that has seen nothing yet.
        pivot = gl.where(new_largest == -float("inf"), 0.0, new_largest)
    rescale = gl.exp2(largest - pivot)
    negative = gl.zeros_like(scores) - pivot[:, None]
    probability = gl.exp2(gl.fma(scores, gl.zeros_like(scores) + by_score, negative))
    total = gl.fma(total, rescale, gl.sum(probability, axis=1))
    return probability, new_largest, total, rescale


@gluon.jit
def wgmma_operand(probability, T: gl.constexpr):
    """Rounded to 16 bits. One instruction converts two numbers: with an instruction for each number, the
    compiler would swap the halves afterwards.
    """
    asm: gl.constexpr = f"cvt.rn.{'f16x2' if T.half else 'bf16x2'}.f32 $0, $2, $1;"
    halves = gl.inline_asm_elementwise(asm, "=r,r,r", [probability], dtype=T.dtype, is_pure=True, pack=2)
    layout: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(T.dim), 2)
    return gl.convert_layout(halves, layout, assert_trivial=True)


@gluon.jit
def consume_block(
    query, ring, turn, block, probability, sums, largest, total, position, factor, softcap, item, window,
    WHICH: gl.constexpr, MASKED: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Multiply queries by the keys of block number `block`, take the softmax, and multiply the previous
    block's probabilities by its values.
    """
    before = turn - 1
    zeros = gl.full([ROWS, T.block], 0.0, gl.float32, score_layout(T))
    mbarrier.wait(ring.keys_full.index(slot_of(turn, T)), phase_of(turn, T))
    take_turn(WHICH)
    key = ring.keys.index(slot_of(turn, T)).permute((1, 0))
    products = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
    mbarrier.wait(ring.values_full.index(slot_of(before, T)), phase_of(before, T))
    sums = warpgroup_mma(probability, ring.values.index(slot_of(before, T)), sums, is_async=True)
    pass_turn(1 - WHICH)
    products = warpgroup_mma_wait(1, deps=[products])
    mbarrier.arrive(ring.keys_empty.index(slot_of(turn, T)))
    scores, largest, total, rescale = softmax_step(
        products, largest, total, block, position, factor, softcap, item, window, MASKED, T
    )
    sums, probability = warpgroup_mma_wait(0, deps=[sums, probability])
    mbarrier.arrive(ring.values_empty.index(slot_of(before, T)))
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return wgmma_operand(scores, T), sums * rescale[:, None], largest, total


@gluon.jit
def hide_rows(values, first_hidden, T: gl.constexpr):
    """Zero a block's values from a row on: memory there may hold NaN, and zero times NaN is NaN."""
    layout: gl.constexpr = copy_layout(T.dim)
    step: gl.constexpr = 16
    for part in gl.static_range(T.block // step):
        if first_hidden < (part + 1) * step:
            rows = values.slice(part * step, step, dim=0)
            row = part * step + gl.arange(0, step, gl.SliceLayout(1, layout))
            held = rows.load(layout)
            rows.store(gl.where((row < first_hidden)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def places(first_token, item, WHICH: gl.constexpr, T: gl.constexpr):
    """Return where a warpgroup's rows are in q and in out, and which of them exist."""
    layout: gl.constexpr = copy_layout(T.dim)
    row = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, T.dim, gl.SliceLayout(0, layout))
    token = row // T.group
    group = row % T.group
    head = item.kv_head * (T.heads // T.kv_heads) + group
    at = ((first_token + token).to(gl.int64) * T.heads + head)[:, None] * T.dim + dim[None, :]
    is_row = (token < item.count) & (group < T.heads // T.kv_heads)
    return at, is_row[:, None]


@gluon.jit
def opaque(x):
    """Return x in such a way that the compiler cannot know that it is the same number."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_queries(q, items, round, WHICH: gl.constexpr, T: gl.constexpr):
    """Return a warpgroup's rows of this program's item of a round; rows of any item if it has none."""
    item = items.item(gl.minimum(items.number(round), items.count - 1), T)
    at, is_row = places(item.first_token, item, WHICH, T)
    return gl.load(q + at, mask=is_row, other=0.0)


@gluon.jit
def e4m3_rows(rows):
    """Round rows [ROWS, dim] to e4m3, and return each row's divisor. The divisor is never zero, because
    `softmax_step` multiplies minus infinity by it.
    """
    values = rows.to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(values), axis=1), LEAST_LARGEST)
    inverse = 448.0 / largest
    return (values * inverse[:, None]).to(gl.float8e4nv), largest * (1.0 / 448.0)


@gluon.jit
def e4m3_view(queries, WHICH: gl.constexpr, T: gl.constexpr):
    """Return a warpgroup's memory for queries as e4m3; e4m3 queries take only its first half."""
    return reinterpret(queries, gl.float8e4nv, [4, ROWS, T.dim], T.key_layout).index(2 * WHICH)


@gluon.jit
def consumer_partition(
    q, out, queries, ring, key_scale, value_scale, sinks, scale_log2, softcap, items,
    WHICH: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Run one warpgroup, which computes the 64 rows of each item from row 64 * WHICH on."""
    if WHICH == 1:
        pass_turn(0)
    turns = items.count * 0
    following = load_queries(q, items, 0, WHICH, T)
    for round in range(0, items.rounds()):
        number = items.number(round)
        if number < items.count:
            item = items.item(number, T)
            factor = scale_log2
            if T.e4m3_keys:
                codes, scale = e4m3_rows(following)
                e4m3_view(queries, WHICH, T).store(codes)
                factor = scale_log2 * gl.convert_layout(scale, gl.SliceLayout(1, score_layout(T)))
            else:
                queries.index(WHICH).store(following.to(T.dtype))
            fence_async_shared()
            thread_barrier()
            if item.num_blocks > 0:
                attend_item(
                    out, queries, ring, key_scale, value_scale, sinks, factor, softcap, turns, item,
                    items.window, WHICH, T,
                )  # fmt: skip
            turns += item.num_blocks
            following = load_queries(q, items, round + 1, WHICH, T)


@gluon.jit
def attend_item(
    out, queries, ring, key_scale, value_scale, sinks, factor, softcap, turns, item, window,
    WHICH: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Compute an item's blocks; the first is block number `turns` of the rings."""
    if key_scale is not None:
        factor *= gl.load(key_scale + item.kv_head)
    by_row: gl.constexpr = gl.SliceLayout(1, score_layout(T))
    row = WHICH * ROWS + gl.arange(0, ROWS, by_row)
    position = item.start + row // T.group
    largest = gl.full([ROWS], -float("inf"), gl.float32, by_row)
    total = gl.full([ROWS], 0.0, gl.float32, by_row)
    if sinks is not None:
        group: gl.constexpr = T.heads // T.kv_heads
        head = item.kv_head * group + row % T.group
        sink = gl.load(sinks + head, mask=row % T.group < group, other=0.0)
        largest = sink.to(gl.float32) * 1.4426950408889634
        total += 1.0

    operand = queries.index(WHICH)
    if T.e4m3_keys:
        operand = e4m3_view(queries, WHICH, T)
    zeros = gl.full([ROWS, T.block], 0.0, gl.float32, score_layout(T))
    mbarrier.wait(ring.keys_full.index(slot_of(turns, T)), phase_of(turns, T))
    key = ring.keys.index(slot_of(turns, T)).permute((1, 0))
    products = warpgroup_mma(operand, key, zeros, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(ring.keys_empty.index(slot_of(turns, T)))
    scores, largest, total, _ = softmax_step(
        products, largest, total, 0, position, factor, softcap, item, window, True, T
    )
    probability = wgmma_operand(scores, T)
    sums = gl.full([ROWS, T.dim], 0.0, gl.float32, accumulator_layout(T.dim))
    masked_from = gl.maximum(item.masked_from - item.first_block, 1)
    if not T.window:
        for block in range(1, masked_from):
            probability, sums, largest, total = consume_block(
                operand, ring, turns + block, block, probability, sums, largest, total, position, factor,
                softcap, item, window, WHICH, False, T,
            )  # fmt: skip
    for block in range(masked_from, item.num_blocks):
        probability, sums, largest, total = consume_block(
            operand, ring, turns + block, block, probability, sums, largest, total, position, factor, softcap,
            item, window, WHICH, True, T,
        )  # fmt: skip

    last = turns + item.num_blocks - 1
    values = ring.values.index(slot_of(last, T))
    mbarrier.wait(ring.values_full.index(slot_of(last, T)), phase_of(last, T))
    shown = item.end - (item.first_block + item.num_blocks - 1) * T.block
    if shown < T.block:
        hide_rows(values, shown, T)
    sums = warpgroup_mma(probability, values, sums, is_async=True)
    sums, probability = warpgroup_mma_wait(0, deps=[sums, probability])
    mbarrier.arrive(ring.values_empty.index(slot_of(last, T)))
    total = gl.convert_layout(total, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    inverse = gl.where(total > 0, 1.0 / total, 0.0)
    if value_scale is not None:
        inverse *= gl.load(value_scale + item.kv_head)
    # The queries' place serves to write whole rows.
    out_dtype: gl.constexpr = out.dtype.element_ty
    staging = reinterpret(queries, out_dtype, [2, ROWS, T.dim], queries.layout).index(WHICH)
    staging.store((sums * inverse[:, None]).to(out.dtype.element_ty))
    thread_barrier()
    # Worked out again, since they would take registers all the while.
    at, is_row = places(opaque(item.first_token), item, WHICH, T)
    gl.store(out + at, staging.load(copy_layout(T.dim)), mask=is_row)
    thread_barrier()


@gluon.jit(do_not_specialize=["num_tiles", "key_table_stride", "table_stride", "window"])
def hopper_prefill_kernel(
    q, key_desc, value_desc, key_table, block_table, tiles, key_scale, value_scale, sinks, out,
    scale_log2, softcap, num_tiles, window, key_table_stride, table_stride, T: gl.constexpr,
):  # fmt: skip
    """The grid has any number of programs; each occupies a whole SM."""
    items = Items(tiles, num_tiles * (T.parts * T.kv_heads), window)
    layout: gl.constexpr = value_desc.layout
    slots: gl.constexpr = [T.slots, T.block, T.dim]
    num_boxes: gl.constexpr = T.slots * (T.block // T.box)
    key_boxes: gl.constexpr = [num_boxes * (T.dim // T.key_width), T.box, T.key_width]
    value_boxes: gl.constexpr = [num_boxes * (T.dim // T.value_width), T.box, T.value_width]
    queries = gl.allocate_shared_memory(T.dtype, [2, ROWS, T.dim], layout)
    keys = gl.allocate_shared_memory(T.key_dtype, slots, T.key_layout)
    values = gl.allocate_shared_memory(T.dtype, slots, layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [T.slots, 1], mbarrier.MBarrierLayout())
    keys_empty = gl.allocate_shared_memory(gl.int64, [T.slots, 1], mbarrier.MBarrierLayout())
    values_full = gl.allocate_shared_memory(gl.int64, [T.slots, 1], mbarrier.MBarrierLayout())
    values_empty = gl.allocate_shared_memory(gl.int64, [T.slots, 1], mbarrier.MBarrierLayout())
    num_slots: gl.constexpr = T.slots
    for slot in gl.static_range(num_slots):
        mbarrier.init(keys_full.index(slot), count=1)
        mbarrier.init(values_full.index(slot), count=1)
        mbarrier.init(keys_empty.index(slot), count=2)
        mbarrier.init(values_empty.index(slot), count=2)
    ring = Ring(
        keys, values,
        reinterpret(keys, T.key_dtype, key_boxes, T.key_layout),
        reinterpret(values, T.dtype, value_boxes, layout),
        keys_full, keys_empty, values_full, values_empty,
    )  # fmt: skip
    gl.warp_specialize([
        (consumer_partition, (
            q, out, queries, ring, key_scale, value_scale, sinks, scale_log2, softcap, items, 0, T
        )),
        (consumer_partition, (
            q, out, queries, ring, key_scale, value_scale, sinks, scale_log2, softcap, items, 1, T
        )),
        (producer_partition, (
            key_desc, value_desc, ring, key_table, block_table, key_table_stride, table_stride, items, T
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@functools.cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def hopper_prefill(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    options: AttentionOptions,
    out: Tensor,
    key_table: Tensor | None = None,
) -> None:
    """Write the tiles' tokens of `out`; arguments are as in the file's docstring and in `prefill_attention`.

    key_table: the block table of the keys, if keys lie in other pages than values
    """
    heads, dim = q.shape[1:]
    kv_heads, page = key_pages.shape[1:3]
    half, e4m3 = value_pages.dtype == torch.float16, key_pages.dtype == torch.float8_e4m3fn
    window, softcap, slots = options.window > 0, bool(options.softcap), E4M3_SLOTS if e4m3 else 2
    form = Form(heads, kv_heads, dim, page, half, window, softcap, e4m3, slots)
    descriptors = [
        TensorDescriptor.from_tensor(pages.view(-1, dim), [form.box, width], layout)
        for pages, width, layout in (
            (key_pages, form.key_width, form.key_layout),
            (value_pages, form.value_width, x_layout()),
        )
    ]
    key_table = block_table if key_table is None else key_table
    programs = min(len(tiles) * form.parts * kv_heads, num_sms(q.device))
    hopper_prefill_kernel[(programs,)](
        q, *descriptors, key_table, block_table, tiles,
        options.key_scale, options.value_scale, options.sinks, out,
        options.scale_log2, options.softcap_log2, len(tiles), options.window,
        key_table.stride(0), block_table.stride(0), T=form, **OPTIONS,
    )  # fmt: skip
