"""Writes KVarN pages: every page that is due is normalized, quantized and packed in one launch.

The reference is `quantize_reference` in `reference.py`. A page is due, that is, has to be quantized, as soon
as it has its last token. A decoding request's next step first writes that page, in all layers at once
(`flush_decoded`): the host reads nothing, and a launch ends at once if no page is due. Prefill writes the
pages that it fills within the step, because later tokens of the prompt read them (`flush_prompts`).
`flush_decoded` and `flush_prompts` rotate the same rows with the same products, so a page holds the same
codes whichever function wrote it.

There are two writers. GPUs of compute capability 8.0 and more (A100, RTX 30 and newer) run the Gluon kernels
of `flush_pages.py`. Older GPUs (V100, T4, RTX 20) and Triton's interpreter run the Triton kernels below.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...device import compute_capability
from ...hadamard import log2, rotate
from ...triton_imports import tl, triton
from .flush_pages import decoded_kernel, launch, prompts_kernel
from .held import held_at
from .reference import ITERATIONS, KVarNTile

REQUESTS = 32
"""That one program looks at: without a page due, a launch takes as long as its programs take to start."""


@triton.jit
def _both_ends(largest_a, least_a, largest_b, least_b):
    return tl.maximum(largest_a, largest_b), tl.minimum(least_a, least_b)


LOW = tl.constexpr(2048.0)
"""Times this, what fp16 leaves of a number is an fp16 number again."""
LARGEST_WEIGHT = tl.constexpr(250.0)
"""Whose square fp16 holds."""


@triton.jit
def _lift(largest):
    """Return the power of two that brings a positive number to 32 .. 64: its square then fits fp16."""
    exponent = tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    return (0x7E800000 - exponent).to(tl.float32, bitcast=True) * 64.0


@triton.jit
def _halves(x):
    """Return x as two fp16 numbers, the second one to be divided by LOW."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)) * LOW


@triton.jit
def _variance(x, squares, squares_low, weight, unit, COUNT: tl.constexpr):
    """Return the variance of each row of x * unit, its columns multiplied by weight / unit; computed by
    products on the matrix units.

    x is fp16 [N, COUNT], its squares are given as two halves, and weight is fp32 [COUNT]. If only the upper
    halves were used, sums over squares would have a relative error of 1e-5, and one of 10,000 codes would
    differ by one.
    """
    weight = tl.minimum(weight, LARGEST_WEIGHT)
    high, low = _halves(weight)
    square_high, square_low = _halves(weight * weight)
    column = tl.arange(0, 16)[None, :]
    weights = tl.where(column == 0, high[:, None], tl.where(column == 1, low[:, None], 0.0))
    weights = tl.where(column == 2, square_high[:, None], weights)
    weights = tl.where(column == 3, square_low[:, None], weights).to(tl.float16)
    sums = tl.dot(x, weights)
    of_squares = tl.dot(squares, weights) + tl.dot(squares_low, weights) * (1.0 / LOW)
    part = tl.where(column % 2 == 0, 1.0, 1.0 / LOW)
    total = tl.sum(tl.where(column < 2, sums * part, 0.0), axis=1)
    total_squares = tl.sum(tl.where((column == 2) | (column == 3), of_squares * part, 0.0), axis=1)
    variance = (total_squares - total * total * (1.0 / COUNT)) * (1.0 / (COUNT - 1))
    return tl.maximum(variance, 0.0) * unit * unit


@triton.jit
def _evened(inverse, variance):
    """Return the inverse scales after one more turn, and the inverse deviations. `variance` is the variance
    of the unscaled vectors.

    Deviations are bounded to 1e-3 .. 1e3, scales to e^-0.3 .. e^10.
    """
    inverse *= tl.minimum(tl.maximum(tl.rsqrt(variance * inverse * inverse), 1e-3), 1e3)
    inverse = tl.minimum(tl.maximum(inverse, 4.5399929762484854e-05), 1.3498588075760032)
    return inverse, tl.rsqrt(variance * inverse * inverse)


@triton.jit
def _spread(inverse_std):
    largest, least = tl.reduce((inverse_std, inverse_std), 0, _both_ends)
    return tl.minimum(largest, 1e8) / least


@triton.jit
def _normalize(
    tile, KEYS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr, ITERATIONS: tl.constexpr
):
    """Return inverse scales of tokens [G] and of channels [D]. Each turn scales the tile's columns first; in
    a tile of keys, these are tokens.

    A row's own scale only multiplies its deviation, and the columns' scales are weights in sums over the tile
    and over its squares. Tile and squares never change, so each turn takes two products of both with a few
    columns. The scales of the side that is normalized first carry the magnitude of the tile. Where the paper
    adds logarithms of scales, this code multiplies inverse scales.
    """
    largest = tl.max(tl.max(tl.abs(tile), axis=1), axis=0).to(tl.float32)
    lift = _lift(largest)
    unit = 1.0 / lift
    lifted = tile.to(tl.float32) * lift
    x = lifted.to(tl.float16)
    squares, squares_low = _halves(lifted * lifted)
    squares_low = squares_low.to(tl.float16)
    x_t, squares_t, squares_low_t = tl.trans(x), tl.trans(squares), tl.trans(squares_low)
    of_token = tl.full([GROUP_SIZE], 1.0, tl.float32)
    of_channel = tl.full([DIM], 1.0, tl.float32)
    best_token, best_channel = of_token, of_channel
    token_variance = _variance(x, squares, squares_low, of_channel, unit, DIM)
    channel_variance = _variance(x_t, squares_t, squares_low_t, of_token, unit, GROUP_SIZE)
    least = _spread(tl.rsqrt(token_variance)) + _spread(tl.rsqrt(channel_variance))
    for _ in range(ITERATIONS):
        if KEYS:
            of_token, _unused = _evened(of_token, token_variance)
            channel_variance = _variance(x_t, squares_t, squares_low_t, of_token * unit, 1.0, GROUP_SIZE)
            of_channel, channel_std = _evened(of_channel, channel_variance)
            token_variance = _variance(x, squares, squares_low, of_channel, unit, DIM)
            token_std = tl.rsqrt(token_variance * of_token * of_token)
        else:
            of_channel, _unused = _evened(of_channel, channel_variance)
            token_variance = _variance(x, squares, squares_low, of_channel * unit, 1.0, DIM)
            of_token, token_std = _evened(of_token, token_variance)
            channel_variance = _variance(x_t, squares_t, squares_low_t, of_token, unit, GROUP_SIZE)
            channel_std = tl.rsqrt(channel_variance * of_channel * of_channel)
        imbalance = _spread(token_std) + _spread(channel_std)
        better = imbalance <= least
        best_token = tl.where(better, of_token, best_token)
        best_channel = tl.where(better, of_channel, best_channel)
        least = tl.minimum(least, imbalance)
    return best_token, best_channel


@triton.jit
def _codes(offset, per_step, BITS: tl.constexpr):
    """Round half to even, as torch does: adding 1.5 * 2^23 leaves the rounded integer in the low bits."""
    rounded = tl.minimum(tl.maximum(offset * per_step, 0.0), (1 << BITS) - 1) + 12582912.0
    return rounded.to(tl.int32, bitcast=True) & ((1 << BITS) - 1)


@triton.jit
def _write_keys(
    tile, at, words_ptr, channels_ptr, tokens_ptr,
    GROUP_SIZE: tl.constexpr, DIM: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Write the keys of tile number `at`, fp16 [G, D]; the layout is KVarNTile's."""
    WIDTH: tl.constexpr = DIM // 4
    token = tl.arange(0, GROUP_SIZE)
    channels_ptr += at * 3 * DIM + tl.arange(0, DIM)
    by_token, by_channel = _normalize(tile, True, GROUP_SIZE, DIM, ITERATIONS)
    normal = tile.to(tl.float32) * by_channel[None, :] * by_token[:, None]
    largest, zero = tl.reduce((normal, normal), 0, _both_ends)
    step = tl.maximum((largest - zero) / 15.0, 1e-6)
    codes = _codes(normal - zero[None, :], (1.0 / step)[None, :], 4)
    shift = tl.arange(0, 4) * 4
    words = tl.sum(tl.reshape(codes, [GROUP_SIZE, 4, WIDTH]) << shift[None, :, None], axis=1)
    where = (at * GROUP_SIZE + token)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(words_ptr + where, words.to(tl.int16))
    tl.store(channels_ptr, (step / by_channel).to(tl.float16))
    tl.store(channels_ptr + DIM, (zero / by_channel).to(tl.float16))
    tl.store(tokens_ptr + at * 3 * GROUP_SIZE + token, (1.0 / by_token).to(tl.float16))


@triton.jit
def _write_values(
    tile, at, words_ptr, channels_ptr, tokens_ptr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Write the values of tile number `at`, fp16 [G, D]; the layout is KVarNTile's."""
    WIDTH: tl.constexpr = DIM // 4
    HALVES: tl.constexpr = 4 // BITS
    ROWS: tl.constexpr = GROUP_SIZE // HALVES
    tokens_ptr += at * 3 * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    by_token, by_channel = _normalize(tile, False, GROUP_SIZE, DIM, ITERATIONS)
    normal = tile.to(tl.float32) * by_token[:, None] * by_channel[None, :]
    largest, zero = tl.reduce((normal, normal), 1, _both_ends)
    step = tl.maximum((largest - zero) / ((1 << BITS) - 1), 1e-6)
    codes = _codes(normal - zero[:, None], (1.0 / step)[:, None], BITS)
    shift = tl.arange(0, 4) * BITS
    slices = tl.sum(tl.reshape(codes, [GROUP_SIZE, 4, WIDTH]) << shift[None, :, None], axis=1)
    half = tl.arange(0, HALVES) * (4 * BITS)
    words = tl.sum(tl.reshape(slices, [HALVES, ROWS, WIDTH]) << half[:, None, None], axis=0)
    where = (at * ROWS + tl.arange(0, ROWS))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(words_ptr + where, words.to(tl.int16))
    channel = channels_ptr + at * 3 * DIM + 2 * DIM + tl.arange(0, DIM)
    tl.store(channel, (1.0 / by_channel).to(tl.float16))
    tl.store(tokens_ptr + GROUP_SIZE, (step / by_token).to(tl.float16))
    tl.store(tokens_ptr + 2 * GROUP_SIZE, (zero / by_token).to(tl.float16))


@triton.jit
def _write_tile(
    rows, at, side, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr,
    VALUE_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr,
    ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Load, normalize and write one tile: keys if the side is 0, else values; not yet rotated."""
    tile = rotate(rows.to(tl.float32), GROUP_SIZE, DIM, LOG_DIM).to(tl.float16)
    if side == 0:
        _write_keys(tile, at, words_k_ptr, channels_ptr, tokens_ptr, GROUP_SIZE, DIM, ITERATIONS)
    else:
        _write_values(
            tile, at, words_v_ptr, channels_ptr, tokens_ptr, VALUE_BITS, GROUP_SIZE, DIM, ITERATIONS
        )


@triton.jit(do_not_specialize=["table_stride", "num_requests"])
def _flush_decoded(
    layers_ptr, held_ptr, lengths_ptr, rows_ptr, written_ptr, table_ptr, table_stride, num_requests,
    KV_HEADS: tl.constexpr, VALUE_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr,
    LOG_DIM: tl.constexpr, ITERATIONS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Write the due pages of REQUESTS requests, in one layer, keys or values of one head.

    held_ptr: the `held` of any layer, since it has the same layout in all layers
    """
    one_of = tl.program_id(2) * REQUESTS + tl.arange(0, REQUESTS)
    position = tl.load(lengths_ptr + one_of, mask=one_of < num_requests, other=0) - 1
    due = (position % GROUP_SIZE == 0) & (position >= 2 * GROUP_SIZE)
    written = tl.load(written_ptr + tl.load(rows_ptr + one_of, mask=due, other=0), mask=due, other=-1)
    due = due & (written != position // GROUP_SIZE - 1)
    # Neighbours on one side, since a multiprocessor's instruction cache does not hold the code of both.
    head = tl.program_id(0) % KV_HEADS
    side = tl.program_id(0) // KV_HEADS
    layer = layers_ptr + tl.program_id(1) * 5
    token = tl.arange(0, GROUP_SIZE)
    for _ in range(tl.sum(due.to(tl.int32), axis=0)):
        request = tl.min(tl.where(due, one_of, num_requests), axis=0)
        due = due & (one_of != request)
        page = (tl.load(lengths_ptr + request) - 1) // GROUP_SIZE - 1
        row = tl.load(rows_ptr + request)
        at = tl.load(table_ptr + request * table_stride + page).to(tl.int64) * KV_HEADS + head
        pages_ptr = tl.multiple_of(tl.load(layer + 4).to(held_ptr.dtype), 16)
        source = held_at(row, GROUP_SIZE + token, side, head, KV_HEADS, DIM, GROUP_SIZE)
        rows = tl.load(pages_ptr + source[:, None] + tl.arange(0, DIM)[None, :])
        _write_tile(
            rows, at, side,
            tl.multiple_of(tl.load(layer).to(tl.pointer_type(tl.int16)), 16),
            tl.multiple_of(tl.load(layer + 1).to(tl.pointer_type(tl.int16)), 16),
            tl.load(layer + 2).to(tl.pointer_type(tl.float16)),
            tl.load(layer + 3).to(tl.pointer_type(tl.float16)),
            VALUE_BITS, GROUP_SIZE, DIM, LOG_DIM, ITERATIONS,
        )  # fmt: skip


class PromptsForm(NamedTuple):
    """Compile-time parameters of `_flush_prompts`."""

    kv_heads: int
    value_bits: int
    group_size: int
    dim: int
    log_dim: int
    iterations: int


@triton.jit(do_not_specialize=["num_requests", "count"])
def _flush_prompts(
    key_ptr, value_ptr, positions_ptr, slots_ptr, token_rows_ptr, lengths_ptr, held_ptr,
    words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, num_requests, count, key_stride, value_stride,
    FORM: tl.constexpr,
):  # fmt: skip
    """Write the pages that GROUP_SIZE prompt tokens of a step fill: keys or values of one head."""
    offset = tl.arange(0, FORM.group_size)
    one_of = tl.program_id(1).to(tl.int64) * FORM.group_size + offset
    position = tl.load(positions_ptr + one_of, mask=one_of < count, other=0)
    due = (position % FORM.group_size == FORM.group_size - 1) & (position >= FORM.group_size)
    due = due & (tl.load(slots_ptr + one_of, mask=one_of < count, other=-1) >= 0)
    due = due & (tl.load(lengths_ptr + one_of, mask=one_of < num_requests, other=0) == 0)
    # Neighbours on one side, since a multiprocessor's instruction cache does not hold the code of both.
    head = tl.program_id(0) % FORM.kv_heads
    side = tl.program_id(0) // FORM.kv_heads
    new_ptr = key_ptr if side == 0 else value_ptr
    stride = key_stride if side == 0 else value_stride
    dim = tl.arange(0, FORM.dim)[None, :]
    for _ in range(tl.sum(due.to(tl.int32), axis=0)):
        last = tl.min(tl.where(due, one_of, count), axis=0)
        due = due & (one_of != last)
        row = tl.load(token_rows_ptr + last)
        token = last - (FORM.group_size - 1) + offset
        # Those before the chunk, from the page as it was kept.
        is_new = tl.load(token_rows_ptr + token, mask=token >= 0, other=-1) == row
        new = token[:, None] * stride + head * FORM.dim + dim
        old = held_at(
            row, FORM.group_size + offset, side, head, FORM.kv_heads, FORM.dim, FORM.group_size
        )[:, None] + dim  # fmt: skip
        rows = tl.load(new_ptr + new, mask=is_new[:, None] & (dim >= 0), other=0.0)
        rows += tl.load(held_ptr + old, mask=(~is_new)[:, None] & (dim >= 0), other=0.0)
        at = tl.load(slots_ptr + last) // FORM.group_size * FORM.kv_heads + head
        _write_tile(
            rows, at, side, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr,
            FORM.value_bits, FORM.group_size, FORM.dim, FORM.log_dim, FORM.iterations,
        )  # fmt: skip


def addresses(layers: list[tuple[KVarNTile, Tensor]], device: torch.device) -> Tensor:
    """Return int64 [layers, 5]: addresses of each layer's pages and of its `held`, for `flush_decoded`."""
    rows = [[*(part.data_ptr() for part in vars(pages).values()), held.data_ptr()] for pages, held in layers]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _warps(group_size: int, dim: int) -> int:
    return 8 if group_size * dim > 64 * 64 else 4


def flush_decoded(
    layers: Tensor,
    lengths: Tensor,
    request_rows: Tensor,
    block_table: Tensor,
    held: Tensor,
    written: Tensor,
    value_bits: int,
) -> None:
    """Write the pages that decoding requests have just left, in every layer; `held` is one layer's.

    written: as in `held.py`; a prompt has written the page that it ended with
    """
    kv_heads, group_size, dim = held.shape[3:]
    grid = 2 * kv_heads, len(layers), triton.cdiv(len(lengths), REQUESTS)
    where = layers, held, lengths, request_rows, written, block_table, block_table.stride(0), len(lengths)
    sizes = {"KV_HEADS": kv_heads, "VALUE_BITS": value_bits, "GROUP_SIZE": group_size, "DIM": dim}
    if compute_capability(held.device) >= (8, 0):
        decoded_kernel[grid](*where, **sizes, REQUESTS=REQUESTS, **launch(group_size, dim))
    else:
        _flush_decoded[grid](
            *where, **sizes, LOG_DIM=log2(dim), REQUESTS=REQUESTS, ITERATIONS=ITERATIONS,
            num_warps=_warps(group_size, dim),
        )  # fmt: skip


def flush_prompts(
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    slots: Tensor,
    token_rows: Tensor,
    lengths: Tensor,
    held: Tensor,
    pages: KVarNTile,
    value_bits: int,
) -> None:
    """Write the pages of one layer that a step's prompts fill; key and value [T, H_kv, D] as in `held.py`."""
    kv_heads, group_size, dim = held.shape[3:]
    grid = 2 * kv_heads, triton.cdiv(len(key), group_size)
    where = key, value, positions, slots, token_rows, lengths, held, *vars(pages).values()
    numbers = len(lengths), len(key), key.stride(0), value.stride(0)
    sizes = {"KV_HEADS": kv_heads, "VALUE_BITS": value_bits, "GROUP_SIZE": group_size, "DIM": dim}
    if compute_capability(held.device) >= (8, 0):
        prompts_kernel[grid](*where, *numbers, **sizes, **launch(group_size, dim))
    else:
        form = PromptsForm(kv_heads, value_bits, group_size, dim, log2(dim), ITERATIONS)
        _flush_prompts[grid](*where, *numbers, form, num_warps=_warps(group_size, dim))
