"""Decode attention over KVarN's pages on a CPU, with the new token stored first; in numba, without the GIL.

One request and head of keys at a time: its first page as it is held, coded pages, its own page as it is held.
All query heads of the group go together, so that a code is unpacked once, into a block of a few tokens in
fp32 that stays in the nearest cache. Scales of channels go into the query and those of tokens into the
probabilities (`kvarn_page.py`), the query is rotated once and so is what codes give. Nothing depends on the
other requests of a step, and sums have one order: a token's bits follow from its own context.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from .kvarn_tile_cpu import ONE, ZERO, of_half, rotate, widen
from .lanes import WIDTH, exponential, fma, largest, load, splat, store, total

BLOCK = 16
"""Tokens that are unpacked at once: 4 to 16 KB."""
LEAST_ROW = 4 * WIDTH
"""Channels of a row of a block; narrower heads are filled up with zeros."""


@njit(nogil=True, error_model="numpy")
def _copy(held: Any, at: int, count: int, dim: int, block: Any, row: int) -> None:
    for token in range(count):
        for d in range(0, dim, WIDTH):
            store(block, token * row + d, load(held, at + token * dim + d))


@njit(nogil=True, error_model="numpy")
def _score(
    block: Any, count: int, query: Any, queries: int, row: int, scores: Any, at: int, room: int
) -> None:
    """scores[m * room + at + t] of a block's tokens, four at once: a query is loaded once for them."""
    for token in range(0, count, 4):
        for m in range(queries):
            sum0 = sum1 = sum2 = sum3 = splat(ZERO)
            for d in range(token * row, (token + 1) * row, WIDTH):
                q = load(query, (m - token) * row + d)
                sum0 = fma(q, load(block, d), sum0)
                sum1 = fma(q, load(block, d + row), sum1)
                sum2 = fma(q, load(block, d + 2 * row), sum2)
                sum3 = fma(q, load(block, d + 3 * row), sum3)
            first = m * room + at + token
            scores[first], scores[first + 1] = total(sum0), total(sum1)
            scores[first + 2], scores[first + 3] = total(sum2), total(sum3)


@njit(nogil=True, error_model="numpy")
def _add_values(
    block: Any, count: int, probabilities: Any, at: int, room: int, queries: int, row: int, sums: Any
) -> None:
    """sums[m] += p[m, at + t] times token t of the block, for `count` tokens."""
    for m in range(queries):
        for first in range(0, row, 4 * WIDTH):
            d = m * row + first
            sum0, sum1 = load(sums, d), load(sums, d + WIDTH)
            sum2, sum3 = load(sums, d + 2 * WIDTH), load(sums, d + 3 * WIDTH)
            for token in range(count):
                p, v = splat(probabilities[m * room + at + token]), token * row + first
                sum0 = fma(p, load(block, v), sum0)
                sum1 = fma(p, load(block, v + WIDTH), sum1)
                sum2 = fma(p, load(block, v + 2 * WIDTH), sum2)
                sum3 = fma(p, load(block, v + 3 * WIDTH), sum3)
            store(sums, d, sum0)
            store(sums, d + WIDTH, sum1)
            store(sums, d + 2 * WIDTH, sum2)
            store(sums, d + 3 * WIDTH, sum3)


@njit(nogil=True, error_model="numpy")
def _soften(scores: Any, at: int, length: int, room: int, cap: Any, has_sink: bool, sink: Any) -> None:
    """Softmax of scores[at : at + length], which have room for whole vectors. cap: 0 for none"""
    if cap > ZERO:
        for one in range(at, at + length):
            scores[one] = np.tanh(scores[one] / cap) * cap
    for one in range(at + length, at + room):
        scores[one] = -np.inf
    most = load(scores, at)
    for one in range(at + WIDTH, at + room, WIDTH):
        most = max(most, load(scores, one))
    highest = largest(most)
    if has_sink:
        highest = max(highest, sink)
    sums, above = splat(ZERO), splat(-highest)
    for one in range(at, at + room, WIDTH):
        weights = exponential(load(scores, one) + above)
        store(scores, one, weights)
        sums = sums + weights
    weight = total(sums)
    if has_sink:
        weight += np.exp(sink - highest)
    by = splat(ONE / weight)
    for one in range(at, at + room, WIDTH):
        store(scores, one, load(scores, one) * by)


@njit(nogil=True, error_model="numpy")
def _attend(
    query: Any, out: Any, at: int, queries: int, held: Any, begin: int, page: int, length: int, head: int,
    key_words: Any, value_words: Any, channels: Any, tokens: Any, pages: Any,
    scale: Any, cap: Any, sinks: Any,
) -> None:  # fmt: skip
    """out[at :] of the query heads query[at :], flat, of one token, which stands at the end of its context.

    held: flat; the first page's keys of this head begin at `begin`, its values a page of all heads later, and
    the own page's two later
    """
    heads, group, width = key_words.shape[1:]
    dim, bits = 4 * width, 4 * value_words.shape[2] // group
    row, room = max(dim, LEAST_ROW), -(-length // WIDTH) * WIDTH
    side, block_size = heads * group * dim, min(BLOCK, group // 2)
    block, scores = np.zeros(block_size * row, np.float32), np.empty(queries * room, np.float32)
    plain, turned = np.zeros(queries * row, np.float32), np.zeros(queries * row, np.float32)
    scaled, sums = np.zeros(queries * row, np.float32), np.zeros(queries * row, np.float32)
    of_codes, of_page = np.zeros(queries * row, np.float32), np.empty(queries * row, np.float32)
    of_channels, of_tokens = channels.reshape(-1), np.empty(group, np.float32)
    for m in range(queries):
        for d in range(0, dim, WIDTH):
            q = load(query, at + m * dim + d) * splat(scale)
            store(plain, m * row + d, q)
            store(turned, m * row + d, q)
        if page > 1:
            rotate(turned, m * row, dim)
    words, numbers = key_words.reshape(-1), np.empty(queries, np.float32)
    for one in range(page + 1):
        first, count = one * group, min(group, length - one * group)
        if one == 0 or one == page:
            keys = begin + (2 * side if one else 0)
            for token in range(0, count, block_size):
                some = min(block_size, count - token)
                _copy(held, keys + token * dim, some, dim, block, row)
                _score(block, some, plain, queries, row, scores, first + token, room)
            continue
        where = pages[one]
        scales = (where * heads + head) * 3 * dim
        for m in range(queries):
            zeros = splat(ZERO)
            for d in range(0, dim, WIDTH):
                q = load(turned, m * row + d)
                store(scaled, m * row + d, q * load(of_channels, scales + d))
                zeros = fma(q, load(of_channels, scales + dim + d), zeros)
            numbers[m] = total(zeros)
        codes = (where * heads + head) * group * width
        for token in range(0, group, block_size):
            widen(words, codes, token, block_size, group, dim, 4, block, row)
            _score(block, block_size, scaled, queries, row, scores, first + token, room)
        for token in range(group):
            of_tokens[token] = of_half(tokens[where, head, 0, token])
        for m in range(queries):
            for token in range(group):
                where_to = m * room + first + token
                scores[where_to] = (scores[where_to] + numbers[m]) * of_tokens[token]
    for m in range(queries):
        sink = sinks[head * queries + m] if len(sinks) else ZERO
        _soften(scores, m * room, length, room, cap, len(sinks) > 0, sink)
    words = value_words.reshape(-1)
    for one in range(page + 1):
        first, count = one * group, min(group, length - one * group)
        if one == 0 or one == page:
            values = begin + side + (2 * side if one else 0)
            for token in range(0, count, block_size):
                some = min(block_size, count - token)
                _copy(held, values + token * dim, some, dim, block, row)
                _add_values(block, some, scores, first + token, room, queries, row, sums)
            continue
        where = pages[one]
        for m in range(queries):
            numbers[m] = ZERO
            for token in range(group):
                p = scores[m * room + first + token]
                numbers[m] += p * of_half(tokens[where, head, 2, token])
                scores[m * room + first + token] = p * of_half(tokens[where, head, 1, token])
        of_page[:] = ZERO
        codes = (where * heads + head) * value_words.shape[2] * width
        for token in range(0, group, block_size):
            widen(words, codes, token, block_size, group, dim, bits, block, row)
            _add_values(block, block_size, scores, first + token, room, queries, row, of_page)
        scales = ((where * heads + head) * 3 + 2) * dim
        for m in range(queries):
            for d in range(m * row, m * row + dim, WIDTH):
                of_one = load(of_page, d) + splat(numbers[m])
                by = load(of_channels, scales + d - m * row)
                store(of_codes, d, fma(of_one, by, load(of_codes, d)))
    for m in range(queries):
        if page > 1:
            rotate(of_codes, m * row, dim)
        for d in range(0, dim, WIDTH):
            store(out, at + m * dim + d, load(sums, m * row + d) + load(of_codes, m * row + d))


def decode(sources: str) -> Callable[..., None]:
    """sources: a digest of what is compiled into it, as in `kvarn_cpu.py`."""

    def decode(
        query: Any, key: Any, value: Any, out: Any, held: Any,
        key_words: Any, value_words: Any, channels: Any, tokens: Any,
        table: Any, rows: Any, starts: Any, lengths: Any, first_unit: int, last_unit: int,
        scale: float, cap: float, sinks: Any,
    ) -> None:  # fmt: skip
        """Store new tokens and attend, token after token.

        query, out    [T, H, D]
        key, value    [T, H_kv, D]
        table         int32 [R, W], the pages of each request
        rows          int64 [R], of `held`
        starts        int64 [R + 1]: request r has tokens starts[r] .. starts[r + 1], all of one page
        lengths       int64 [T], of each token's context, itself counted
        units         pairs of a request and a head of keys, of which first_unit .. last_unit are computed
        cap           of logits; 0 for none
        sinks         fp32 [H], or empty
        """
        _ = sources
        heads, group, dim = held.shape[3:]
        queries, side = query.shape[1] // heads, heads * group * dim
        flat_query, flat_out, flat_held = query.reshape(-1), out.reshape(-1), held.reshape(-1)
        for unit in range(first_unit, last_unit):
            request, head = unit // heads, unit % heads
            begin = rows[request] * 4 * side + head * group * dim
            for token in range(starts[request], starts[request + 1]):
                page, offset = (lengths[token] - 1) // group, (lengths[token] - 1) % group
                own = begin + (2 * side if page else 0)
                to = own + offset * dim
                for d in range(dim):
                    flat_held[to + d] = key[token, head, d]
                    flat_held[to + side + d] = value[token, head, d]
                _attend(
                    flat_query, flat_out, (token * heads + head) * queries * dim, queries,
                    flat_held, begin, page, lengths[token], head,
                    key_words, value_words, channels, tokens, table[request],
                    np.float32(scale), np.float32(cap), sinks,
                )  # fmt: skip

    return decode
