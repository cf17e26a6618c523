"""KVarN tiles on a CPU: one head's keys or values of a page, coded and read back; in numba.

The arithmetic equals that of `../reference.py`, up to the rounding of sums. The reference keeps the
logarithms of scales; this file keeps the scales, because the logarithms of a tile take a CPU 100 us.

    x  fp32 [G * D], a tile's numbers, flat
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ..reference import ITERATIONS, LARGEST_LOG, LARGEST_STD, LEAST_DIVISOR, LEAST_LOG, LEAST_STD, LEAST_STEP
from .lanes import (
    FROM_HALF,
    WIDTH,
    bits,
    field,
    fma,
    largest,
    load,
    load_words,
    no_words,
    of_bits,
    rotated,
    smallest,
    splat,
    store,
    store_words,
    total,
    with_codes,
)

ZERO, ONE, HALF, INFINITE = np.float32(0), np.float32(1), np.float32(0.5), np.float32(np.inf)
LEAST_SCALE, LARGEST_SCALE = np.float32(np.exp(LEAST_LOG)), np.float32(np.exp(LARGEST_LOG))
LOWEST_STD, HIGHEST_STD = np.float32(LEAST_STD), np.float32(LARGEST_STD)
DIVISOR, STEP = np.float32(LEAST_DIVISOR), np.float32(LEAST_STEP)
DOWN, UP = np.float32(1 / FROM_HALF), np.float32(FROM_HALF)
TOO_LARGE = np.float32(65536)


class Pages(NamedTuple):
    """The fields of `KVarNTile` for [pages, H_kv] tiles, each array flat, with its sizes."""

    key_words: np.ndarray
    value_words: np.ndarray
    channels: np.ndarray
    tokens: np.ndarray
    heads: int
    group: int
    dim: int
    value_bits: int


@njit(error_model="numpy")
def pages_of(key_words: Any, value_words: Any, channels: Any, tokens: Any) -> Any:
    """Return the shapes of arrays [pages, H_kv, ...]: words int16, scales fp16 as uint16."""
    _, heads, group, width = key_words.shape
    return Pages(
        key_words.reshape(-1),
        value_words.reshape(-1),
        channels.reshape(-1),
        tokens.reshape(-1),
        heads,
        group,
        4 * width,
        4 * value_words.shape[2] // group,
    )


@njit(error_model="numpy")
def to_half(x: Any) -> Any:
    """Return the fp16 bits of an fp32 number, rounded to nearest."""
    number = bits(min(abs(x), TOO_LARGE) * DOWN)
    return np.uint16(((number + 0xFFF + ((number >> 13) & 1)) >> 13) | ((bits(x) >> 16) & 0x8000))


@njit(error_model="numpy")
def of_half(half: Any) -> Any:
    """Return the fp32 number of fp16 bits."""
    number = of_bits(np.int32((half & 0x7FFF) << 13)) * UP
    return -number if half > 0x7FFF else number


@njit(error_model="numpy")
def rotate(x: Any, at: int, dim: int) -> None:
    """Multiply x[at : at + dim] by the Hadamard matrix."""
    scale = splat(ONE / np.float32(np.sqrt(dim)))
    for d in range(at, at + dim, WIDTH):
        store(x, d, rotated(load(x, d)) * scale)
    step = WIDTH
    while step < dim:
        for start in range(at, at + dim, 2 * step):
            for d in range(start, start + step, WIDTH):
                low, high = load(x, d), load(x, d + step)
                store(x, d, low + high)
                store(x, d + step, low - high)
        step *= 2


@njit(error_model="numpy")
def widen(pages: Any, tile: int, of_keys: bool, first: int, count: int, x: Any, row: int) -> None:
    """Write the codes of the tile's tokens first .. first + count to x as numbers, a row for each token. The
    tokens are all in one half of the tile.
    """
    words, bits = (pages.key_words, 4) if of_keys else (pages.value_words, pages.value_bits)
    group, width, mask, shift = pages.group, pages.dim // 4, (1 << bits) - 1, 0
    start = (tile * group * bits // 4 + first) * width
    if bits == 2 and first >= group // 2:
        start, shift = start - group // 2 * width, 8
    for token in range(count):
        for d in range(0, width, WIDTH):
            of_words, of_x = start + token * width + d, token * row + d
            if width >= WIDTH:
                lanes = load_words(words, of_words)
                store(x, of_x, field(lanes, shift, mask))
                store(x, of_x + width, field(lanes, shift + bits, mask))
                store(x, of_x + 2 * width, field(lanes, shift + 2 * bits, mask))
                store(x, of_x + 3 * width, field(lanes, shift + 3 * bits, mask))
            else:
                for word in range(width):
                    for j in range(4):
                        code = (words[of_words + word] >> (shift + j * bits)) & mask
                        x[of_x + j * width + word] = np.float32(code)


@njit(error_model="numpy")
def _by_token(x: Any, by: Any, std: Any) -> None:
    """Compute std [G] of a tile's tokens, with its channels multiplied by `by` [D]."""
    dim = len(by)
    for token in range(len(std)):
        sums = squares = splat(ZERO)
        for d in range(0, dim, WIDTH):
            scaled = load(x, token * dim + d) * load(by, d)
            sums, squares = sums + scaled, fma(scaled, scaled, squares)
        std[token] = _std(total(sums), total(squares), dim)


@njit(error_model="numpy")
def _by_channel(x: Any, by: Any, std: Any, squares: Any) -> None:
    """Compute std [D] of a tile's channels, with its tokens multiplied by `by` [G]. squares: scratch [D]"""
    dim, group = len(std), len(by)
    for d in range(0, dim, WIDTH):
        of_lane = of_squares = splat(ZERO)
        for token in range(group):
            scaled = load(x, token * dim + d) * splat(by[token])
            of_lane, of_squares = of_lane + scaled, fma(scaled, scaled, of_squares)
        store(std, d, of_lane)
        store(squares, d, of_squares)
    for d in range(dim):
        std[d] = _std(std[d], squares[d], group)


@njit(error_model="numpy")
def _std(sum_: Any, squares: Any, count: int) -> Any:
    of_count = np.float32(count)
    return np.sqrt(max(squares - sum_ * sum_ / of_count, ZERO) / (of_count - ONE))


@njit(error_model="numpy")
def _even(by: Any, std: Any) -> None:
    """Advance the inverses of the divisors by one turn; std: the vectors' deviations before any division."""
    for index in range(len(by)):
        scaled = min(max(std[index] * by[index], LOWEST_STD), HIGHEST_STD)
        by[index] = ONE / min(max(scaled / by[index], LEAST_SCALE), LARGEST_SCALE)


@njit(error_model="numpy")
def _spread(std: Any, by: Any) -> Any:
    least = largest = std[0] * by[0]
    for index in range(1, len(by)):
        least, largest = min(least, std[index] * by[index]), max(largest, std[index] * by[index])
    return largest / max(least, DIVISOR)


@njit(error_model="numpy")
def _normalize(x: Any, by_token: Any, by_channel: Any, tokens_first: bool) -> None:
    """Find inverses of the scales that make a tile most even; tokens_first: whether each turn scales tokens
    before channels.
    """
    group, dim = len(by_token), len(by_channel)
    of_tokens, of_channels = np.ones(group, np.float32), np.ones(dim, np.float32)
    std_token, std_channel = np.empty(group, np.float32), np.empty(dim, np.float32)
    scratch = np.empty(dim, np.float32)
    _by_token(x, of_channels, std_token)
    _by_channel(x, of_tokens, std_channel, scratch)
    least = INFINITE
    for turn in range(ITERATIONS + 1):
        if turn:
            for side in range(2):
                if tokens_first == (side == 0):
                    _even(of_tokens, std_token)
                    _by_channel(x, of_tokens, std_channel, scratch)
                else:
                    _even(of_channels, std_channel)
                    _by_token(x, of_channels, std_token)
        imbalance = _spread(std_token, of_tokens) + _spread(std_channel, of_channels)
        if imbalance <= least:
            least = imbalance
            # Not as slices: what numba checks their shapes with takes over a second to compile.
            for token in range(group):
                by_token[token] = of_tokens[token]
            for channel in range(dim):
                by_channel[channel] = of_channels[channel]


@njit(error_model="numpy")
def _range_of_channels(x: Any, by_token: Any, by_channel: Any, low: Any, high: Any) -> None:
    """Find the least and the largest number of each channel, [D], once the tile is normalized; x becomes the
    normalized tile.
    """
    dim = len(by_channel)
    for d in range(0, dim, WIDTH):
        least, most = splat(INFINITE), splat(-INFINITE)
        for token in range(len(by_token)):
            normal = load(x, token * dim + d) * load(by_channel, d) * splat(by_token[token])
            store(x, token * dim + d, normal)
            least, most = min(least, normal), max(most, normal)
        store(low, d, least)
        store(high, d, most)


@njit(error_model="numpy")
def _range_of_tokens(x: Any, by_token: Any, by_channel: Any, low: Any, high: Any) -> None:
    """Find the least and the largest number of each token, [G], once the tile is normalized; x becomes the
    normalized tile.
    """
    dim = len(by_channel)
    for token in range(len(by_token)):
        least, most = splat(INFINITE), splat(-INFINITE)
        for d in range(0, dim, WIDTH):
            normal = load(x, token * dim + d) * load(by_channel, d) * splat(by_token[token])
            store(x, token * dim + d, normal)
            least, most = min(least, normal), max(most, normal)
        low[token], high[token] = smallest(least), largest(most)


@njit(error_model="numpy")
def code_tile(
    x: Any, words: Any, at: int, bits: int, of_channels: bool, scales: Any, zeros: Any, others: Any
) -> None:
    """Code a tile and leave the codes in place of the tile.

    of_channels: scale and zero belong to channels, else to tokens; `others` are the scales of the other side.
    """
    ours, other = len(scales), len(others)
    group, dim = (other, ours) if of_channels else (ours, other)
    by_token, by_channel = np.empty(group, np.float32), np.empty(dim, np.float32)
    _normalize(x, by_token, by_channel, of_channels)
    low, high, inverses = np.empty(ours, np.float32), np.empty(ours, np.float32), np.empty(ours, np.float32)
    if of_channels:
        _range_of_channels(x, by_token, by_channel, low, high)
    else:
        _range_of_tokens(x, by_token, by_channel, low, high)
    by_ours, by_other = (by_channel, by_token) if of_channels else (by_token, by_channel)
    for index in range(ours):
        step = max((high[index] - low[index]) / np.float32((1 << bits) - 1), STEP)
        inverses[index] = ONE / step
        scales[index], zeros[index] = to_half(step / by_ours[index]), to_half(low[index] / by_ours[index])
    for index in range(other):
        others[index] = to_half(ONE / by_other[index])
    for token in range(group):
        for d in range(0, dim, WIDTH):
            if of_channels:
                zero, inverse = load(low, d), load(inverses, d)
            else:
                zero, inverse = splat(low[token]), splat(inverses[token])
            lanes = load(x, token * dim + d)
            store(x, token * dim + d, (lanes - zero) * inverse + splat(HALF))
    _pack(x, words, at, bits, group, dim)


@njit(error_model="numpy")
def _pack(codes: Any, words: Any, at: int, bits: int, group: int, dim: int) -> None:
    """codes: fp32 numbers, which this function rounds down"""
    width, halves = dim // 4, 4 // bits
    rows = group // halves
    for row in range(rows):
        for d in range(0, width, WIDTH):
            if width >= WIDTH:
                lanes = no_words()
                for half in range(halves):
                    for j in range(4):
                        of_field = (row + half * rows) * dim + j * width + d
                        lanes = with_codes(lanes, load(codes, of_field), (4 * half + j) * bits)
                store_words(words, at + row * width + d, lanes)
            else:
                for column in range(width):
                    word: Any = 0
                    for half in range(halves):
                        for j in range(4):
                            code = np.int32(codes[(row + half * rows) * dim + j * width + column])
                            word |= code << ((4 * half + j) * bits)
                    words[at + row * width + column] = word
