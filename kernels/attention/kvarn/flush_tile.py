"""Normalizes, quantizes and packs one KVarN tile in a program of few registers; Gluon.

The result equals a tile in `flush.py`; matrix units read operands from registers (from sm_80 on). The tile
lies in shared memory, and both products, along tokens and along channels, load it from there as their left
operand and square it on the way. Because programs need few registers, several fit on a multiprocessor, and
one works while another waits.

    rows      of which each has a scale and a zero: channels of keys, tokens of values
    columns   the others, which have a scale alone and go first in each turn
"""

from ...triton_imports import gl, gluon, mma_v2
from .reference import ITERATIONS as _ITERATIONS

ITERATIONS = gl.constexpr(_ITERATIONS)
LOW = gl.constexpr(2048.0)
"""Times this, what fp16 leaves of a number is an fp16 number again."""
LARGEST_WEIGHT = gl.constexpr(250.0)
"""Whose square fp16 holds."""
COLUMNS = gl.constexpr(8)
DEPTH = gl.constexpr(32)


@gluon.constexpr_function
def accumulator(warps: int):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def _both_ends(largest_a, least_a, largest_b, least_b):
    return gl.maximum(largest_a, largest_b), gl.minimum(least_a, least_b)


@gluon.jit
def _four_ends(a0, a1, a2, a3, b0, b1, b2, b3):
    return gl.maximum(a0, b0), gl.minimum(a1, b1), gl.maximum(a2, b2), gl.minimum(a3, b3)


@gluon.jit
def _half(x):
    """Return x as two fp16 numbers, the second one to be divided by LOW; both as fp32."""
    high = x.to(gl.float16).to(gl.float32)
    return high, (x - high) * LOW


@gluon.jit
def _square(x):
    """Return fp16 x squared as two fp16 numbers, whose sum is exact except for parts below 2^-24."""
    high = gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $1;", "=r,r", [x], gl.float16, True, 2)
    low = gl.inline_asm_elementwise(
        "{.reg .b32 t; neg.f16x2 t, $2; fma.rn.f16x2 $0, $1, $1, t;}",
        "=r,r,r",
        [x, high],
        gl.float16,
        True,
        2,
    )
    return high, low


@gluon.jit
def _variance(tile, weights_smem, weight, unit, MMA: gl.constexpr):
    """Return the variance of each row of tile * unit, fp32 [N], its columns multiplied by weight / unit;
    weight is fp32 [COUNT].

    Sums over the tile and over its squares are products with four columns: halves of weights and of squares.
    """
    N: gl.constexpr = tile.shape[0]
    COUNT: gl.constexpr = tile.shape[1]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))[None, :]
    weight = gl.minimum(weight, LARGEST_WEIGHT)
    high, low = _half(weight)
    square_high, square_low = _half(weight * weight)
    weights = gl.where(column == 0, high[:, None], gl.where(column == 1, low[:, None], 0.0))
    weights = gl.where(column == 2, square_high[:, None], weights)
    weights = gl.where(column == 3, square_low[:, None], weights)
    weights_smem.store(weights.to(gl.float16))
    sums = gl.full([N, COLUMNS], 0.0, gl.float32, MMA)
    of_squares, of_rests = sums, sums
    # Three sums, since each product waits for the one before in its own.
    for start in gl.static_range(0, COUNT, DEPTH):
        x = tile.slice(start, DEPTH, 1).load(gl.DotOperandLayout(0, MMA, 2))
        b = weights_smem.slice(start, DEPTH, 0).load(gl.DotOperandLayout(1, MMA, 2))
        square, rest = _square(x)
        sums = mma_v2(x, b, sums)
        of_squares = mma_v2(square, b, of_squares)
        of_rests = mma_v2(rest, b, of_rests)
    of_squares += of_rests
    part = gl.where(column % 2 == 0, 1.0, 1.0 / LOW)
    total = gl.sum(gl.where(column < 2, sums * part, 0.0), axis=1)
    total_squares = gl.sum(gl.where((column == 2) | (column == 3), of_squares * part, 0.0), axis=1)
    variance = (total_squares - total * total * (1.0 / COUNT)) * (1.0 / (COUNT - 1))
    return gl.maximum(variance, 0.0) * unit * unit


@gluon.jit
def _evened(inverse, variance):
    """Return the inverse scales after one more turn, with the bounds of `flush.py`; the variance is that of
    the unscaled vectors.
    """
    inverse *= gl.minimum(gl.maximum(gl.rsqrt(variance * inverse * inverse), 1e-3), 1e3)
    return gl.minimum(gl.maximum(inverse, 4.5399929762484854e-05), 1.3498588075760032)


@gluon.jit
def _imbalance(row_std, column_std, SAME: gl.constexpr):
    """Return the largest deviation over the least, of rows plus columns; inverse deviations give the same."""
    if SAME:
        a, b, c, d = gl.reduce((row_std, row_std, column_std, column_std), 0, _four_ends)
    else:
        a, b = gl.reduce((row_std, row_std), 0, _both_ends)
        c, d = gl.reduce((column_std, column_std), 0, _both_ends)
    return gl.minimum(a, 1e8) / b + gl.minimum(c, 1e8) / d


@gluon.jit
def normalize(rows, columns, row_weights, column_weights, unit, MMA: gl.constexpr):
    """Return inverse scales of rows [R] and of columns [C], fp32.

    `rows` is fp16 [R, C] in shared memory, `columns` is the same transposed, and the `_weights` are fp16 [R
    or C, 8] in shared memory.
    """
    R: gl.constexpr = rows.shape[0]
    C: gl.constexpr = rows.shape[1]
    VECTOR: gl.constexpr = gl.SliceLayout(1, MMA)
    of_row = gl.full([R], 1.0, gl.float32, VECTOR)
    of_column = gl.full([C], 1.0, gl.float32, VECTOR)
    best_row, best_column = of_row, of_column
    row_variance = _variance(rows, column_weights, of_column, unit, MMA)
    column_variance = _variance(columns, row_weights, of_row, unit, MMA)
    least = _imbalance(gl.rsqrt(row_variance), gl.rsqrt(column_variance), R == C)
    for _ in range(ITERATIONS):
        # Columns take the tile's magnitude.
        of_column = _evened(of_column, column_variance)
        row_variance = _variance(rows, column_weights, of_column * unit, 1.0, MMA)
        of_row = _evened(of_row, row_variance)
        column_variance = _variance(columns, row_weights, of_row, unit, MMA)
        imbalance = _imbalance(
            gl.rsqrt(row_variance * of_row * of_row),
            gl.rsqrt(column_variance * of_column * of_column),
            R == C,
        )
        better = imbalance <= least
        best_row = gl.where(better, of_row, best_row)
        best_column = gl.where(better, of_column, best_column)
        least = gl.minimum(least, imbalance)
    return best_row, best_column


@gluon.jit
def _integers(x):
    """Round half to even, as torch does: adding 1.5 * 2^23 leaves the integer in the low 22 bits."""
    return (x + 12582912.0).to(gl.int32, bitcast=True)


@gluon.jit
def _load(tile, START: gl.constexpr, COUNT: gl.constexpr, MMA: gl.constexpr):
    """Load columns of a tile in shared memory, fp32 [N, COUNT]."""
    # An operand's elements are those of a result that the same thread has.
    x = tile.slice(START, COUNT, 1).load(gl.DotOperandLayout(0, MMA, 2))
    return gl.convert_layout(x, MMA, assert_trivial=True).to(gl.float32)


@gluon.jit
def _row_ends(rows, by_column, MMA: gl.constexpr):
    """Return the largest and the least number of each row of rows [R, C] times by_column, which is fp32 [C]
    in shared memory.
    """
    C: gl.constexpr = rows.shape[1]
    largest = gl.full([rows.shape[0], DEPTH], -float("inf"), gl.float32, MMA)
    least = gl.full([rows.shape[0], DEPTH], float("inf"), gl.float32, MMA)
    for start in gl.static_range(0, C, DEPTH):
        by = by_column.slice(start, DEPTH).load(gl.SliceLayout(0, MMA))[None, :]
        x = _load(rows, start, DEPTH, MMA) * by
        largest, least = gl.maximum(largest, x), gl.minimum(least, x)
    return gl.max(largest, axis=1), gl.min(least, axis=1)


@gluon.jit
def _store_words(
    tile, by_row, less, by_column, less_by_column, words_ptr, BITS: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """Pack codes x * by_column * by_row - less - less_by_column, with x = tile [G, D] in shared memory.

    by_row and less are fp32 [G]; the others are [D] in shared memory. Layout as in KVarNTile.
    """
    G: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1] // 4
    words = gl.full([G, WIDTH], 0, gl.int32, MMA)
    for field in gl.static_range(4):
        by = by_column.slice(field * WIDTH, WIDTH).load(gl.SliceLayout(0, MMA))[None, :]
        less_by = less_by_column.slice(field * WIDTH, WIDTH).load(gl.SliceLayout(0, MMA))[None, :]
        x = _load(tile, field * WIDTH, WIDTH, MMA) * by
        words += _integers(x * by_row[:, None] - less[:, None] - less_by) << (field * BITS)
    token = gl.arange(0, G, gl.SliceLayout(1, MMA))[:, None]
    word = gl.arange(0, WIDTH, gl.SliceLayout(0, MMA))[None, :]
    if BITS == 4:
        gl.store(words_ptr + token * WIDTH + word, words.to(gl.int16))
    else:
        # A byte each: that of a token half a tile further on is the upper one.
        to = words_ptr.to(gl.pointer_type(gl.int8), bitcast=True)
        at = (token % (G // 2) * WIDTH + word) * 2 + token // (G // 2)
        gl.store(to + at, words.to(gl.int8))


@gluon.jit
def write_tile(
    x, at, words_ptr, channels_ptr, tokens_ptr, scratch,
    KEYS: gl.constexpr, BITS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Write x fp16 [G, D] as tile number `at`; the layout is KVarNTile's.

    scratch: shared memory for fp16 [G, D], [G, 8] and [D, 8], and twice for fp32 [max(G, D)]
    """
    tile, token_weights, channel_weights, by_column, less_by_column = scratch
    G: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    VECTOR: gl.constexpr = gl.SliceLayout(1, MMA)
    LEVELS: gl.constexpr = (1 << BITS) - 1
    largest = gl.max(gl.max(gl.maximum(x, -x).to(gl.float32), axis=1), axis=0)
    # The power of two that brings the largest to 64 .. 128: its square is an fp16 number then.
    exponent = gl.maximum(largest, 1e-30).to(gl.int32, bitcast=True) & 0x7F800000
    lift = (0x7E800000 - exponent).to(gl.float32, bitcast=True) * 128.0
    unit = 1.0 / lift
    tile.store((x.to(gl.float32) * lift).to(gl.float16))
    token = gl.arange(0, G, VECTOR)
    channel = gl.arange(0, D, VECTOR)
    channels_ptr += at * 3 * D + channel
    tokens_ptr += at * 3 * G + token
    if KEYS:
        turned = tile.permute((1, 0))
        by_channel, by_token = normalize(turned, tile, channel_weights, token_weights, unit, MMA)
        by_column.slice(0, G).store(by_token * unit)
        largest, zero = _row_ends(turned, by_column.slice(0, G), MMA)
        step = gl.maximum((largest - zero) * by_channel * (1.0 / LEVELS), 1e-6) / by_channel
        gl.store(channels_ptr, step.to(gl.float16))
        gl.store(channels_ptr + D, zero.to(gl.float16))
        gl.store(tokens_ptr, (1.0 / by_token).to(gl.float16))
        by_column.slice(0, D).store(1.0 / step)
        less_by_column.slice(0, D).store(zero / step)
        nothing = gl.full([G], 0.0, gl.float32, VECTOR)
        words_ptr += at * G * (D // 4)
        _store_words(
            tile,
            by_token * unit,
            nothing,
            by_column.slice(0, D),
            less_by_column.slice(0, D),
            words_ptr,
            4,
            MMA,
        )
    else:
        by_token, by_channel = normalize(
            tile, tile.permute((1, 0)), token_weights, channel_weights, unit, MMA
        )
        by_column.slice(0, D).store(by_channel * unit)
        less_by_column.slice(0, D).store(by_channel * 0.0)
        largest, zero = _row_ends(tile, by_column.slice(0, D), MMA)
        step = gl.maximum((largest - zero) * by_token * (1.0 / LEVELS), 1e-6) / by_token
        gl.store(channels_ptr + 2 * D, (1.0 / by_channel).to(gl.float16))
        gl.store(tokens_ptr + G, step.to(gl.float16))
        gl.store(tokens_ptr + 2 * G, zero.to(gl.float16))
        words_ptr += at * (G * BITS // 4) * (D // 4)
        _store_words(
            tile,
            1.0 / step,
            zero / step,
            by_column.slice(0, D),
            less_by_column.slice(0, D),
            words_ptr,
            BITS,
            MMA,
        )
