"""Decode attention over KVarN's pages on a CPU, with the new token stored first; in numba, without the GIL.

The kernel handles one request and kv head at a time: its first page and its last page uncoded, the pages
between as codes. All query heads of the group are handled together, so a code is unpacked once, into a block
of a few tokens in fp32 that stays in the nearest cache. The query is multiplied by the channels' scales and
the probabilities by the tokens' scales (`../page.py`). The query is rotated once, and so is the result over
coded pages. Sums have one order and do not depend on other requests: a token's bits follow from its own
context alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .lanes import WIDTH, exponential, fma, largest, load, splat, store, total
from .tile import ONE, ZERO, of_half, pages_of, rotate, widen

BLOCK = 16
"""Tokens that are unpacked at once: 4 to 16 KB."""
LEAST_ROW = 4 * WIDTH
"""Channels of a row of a block; narrower heads are filled up with zeros."""


class Queries(NamedTuple):
    """The query heads of one token that share a kv head, with their intermediate results; all are flat,
    fp32.
    """

    heads: int
    row: int
    """Numbers of a query, and of a token in `block`."""
    room: int
    """Scores of a query."""
    plain: np.ndarray
    turned: np.ndarray
    """Rotated."""
    scaled: np.ndarray
    """The same times the scales of a page's channels."""
    scores: np.ndarray
    """[heads, room], then probabilities."""
    block: np.ndarray
    """Keys or values of a few tokens."""


@njit(error_model="numpy")
def _fill(block: Any, held: Any, at: int, count: int, dim: int, row: int) -> None:
    for token in range(count):
        for d in range(0, dim, WIDTH):
            store(block, token * row + d, load(held, at + token * dim + d))


@njit(error_model="numpy")
def score_block(queries: Any, query: Any, count: int, at: int) -> None:
    """Compute the scores of the block's `count` tokens, stored from `at` on, four tokens at a time, so that a
    query is loaded once for four tokens.
    """
    row, block, scores = queries.row, queries.block, queries.scores
    for token in range(0, count, 4):
        for m in range(queries.heads):
            sum0 = sum1 = sum2 = sum3 = splat(ZERO)
            for d in range(token * row, (token + 1) * row, WIDTH):
                q = load(query, (m - token) * row + d)
                sum0 = fma(q, load(block, d), sum0)
                sum1 = fma(q, load(block, d + row), sum1)
                sum2 = fma(q, load(block, d + 2 * row), sum2)
                sum3 = fma(q, load(block, d + 3 * row), sum3)
            first = m * queries.room + at + token
            scores[first], scores[first + 1] = total(sum0), total(sum1)
            scores[first + 2], scores[first + 3] = total(sum2), total(sum3)


@njit(error_model="numpy")
def add_block(queries: Any, count: int, at: int, sums: Any) -> None:
    """Add the values of the block's `count` tokens, times their probabilities, which lie from `at` on, to
    sums [heads, row].
    """
    row, block = queries.row, queries.block
    for m in range(queries.heads):
        for first in range(0, row, 4 * WIDTH):
            d = m * row + first
            sum0, sum1 = load(sums, d), load(sums, d + WIDTH)
            sum2, sum3 = load(sums, d + 2 * WIDTH), load(sums, d + 3 * WIDTH)
            for token in range(count):
                p, v = splat(queries.scores[m * queries.room + at + token]), token * row + first
                sum0 = fma(p, load(block, v), sum0)
                sum1 = fma(p, load(block, v + WIDTH), sum1)
                sum2 = fma(p, load(block, v + 2 * WIDTH), sum2)
                sum3 = fma(p, load(block, v + 3 * WIDTH), sum3)
            store(sums, d, sum0)
            store(sums, d + WIDTH, sum1)
            store(sums, d + 2 * WIDTH, sum2)
            store(sums, d + 3 * WIDTH, sum3)


@njit(error_model="numpy")
def _score_codes(queries: Any, pages: Any, page: int, head: int, at: int) -> None:
    """Compute the scores of a coded page's tokens, stored from `at` on: ((q * k_scale) . codes + q . k_zero)
    * k_token.
    """
    dim, group, tile = pages.dim, pages.group, page * pages.heads + head
    scale, of_tokens = tile * 3 * dim, tile * 3 * group
    zeros = np.empty(queries.heads, np.float32)
    for m in range(queries.heads):
        sums = splat(ZERO)
        for d in range(0, dim, WIDTH):
            q = load(queries.turned, m * queries.row + d)
            store(queries.scaled, m * queries.row + d, q * load(pages.channels, scale + d))
            sums = fma(q, load(pages.channels, scale + dim + d), sums)
        zeros[m] = total(sums)
    size = len(queries.block) // queries.row
    for token in range(0, group, size):
        widen(pages, tile, True, token, size, queries.block, queries.row)
        score_block(queries, queries.scaled, size, at + token)
    for token in range(group):
        by = of_half(pages.tokens[of_tokens + token])
        for m in range(queries.heads):
            place = m * queries.room + at + token
            queries.scores[place] = (queries.scores[place] + zeros[m]) * by


@njit(error_model="numpy")
def _add_codes(queries: Any, pages: Any, page: int, head: int, at: int, of_page: Any, sums: Any) -> None:
    """Add a coded page's values: ((p * v_scale) . codes + p . v_zero) * v_channel. of_page: scratch"""
    dim, group, tile = pages.dim, pages.group, page * pages.heads + head
    of_channels, of_tokens = (tile * 3 + 2) * dim, tile * 3 * group
    zeros = np.zeros(queries.heads, np.float32)
    for token in range(group):
        scale = of_half(pages.tokens[of_tokens + group + token])
        zero = of_half(pages.tokens[of_tokens + 2 * group + token])
        for m in range(queries.heads):
            place = m * queries.room + at + token
            zeros[m] += queries.scores[place] * zero
            queries.scores[place] *= scale
    of_page[:] = ZERO
    size = len(queries.block) // queries.row
    for token in range(0, group, size):
        widen(pages, tile, False, token, size, queries.block, queries.row)
        add_block(queries, size, at + token, of_page)
    for m in range(queries.heads):
        for d in range(0, dim, WIDTH):
            place, by = m * queries.row + d, load(pages.channels, of_channels + d)
            store(sums, place, fma(load(of_page, place) + splat(zeros[m]), by, load(sums, place)))


@njit(error_model="numpy")
def soften(scores: Any, at: int, length: int, room: int, cap: Any, has_sink: bool, sink: Any) -> None:
    """Take the softmax of scores[at : at + length]; the array is padded to whole vectors. cap: 0 for none"""
    if cap > ZERO:
        for place in range(at, at + length):
            scores[place] = np.tanh(scores[place] / cap) * cap
    for place in range(at + length, at + room):
        scores[place] = -np.inf
    most = load(scores, at)
    for place in range(at + WIDTH, at + room, WIDTH):
        most = max(most, load(scores, place))
    highest = largest(most)
    if has_sink:
        highest = max(highest, sink)
    sums, above = splat(ZERO), splat(-highest)
    for place in range(at, at + room, WIDTH):
        weights = exponential(load(scores, place) + above)
        store(scores, place, weights)
        sums = sums + weights
    weight = total(sums)
    if has_sink:
        weight += np.exp(sink - highest)
    by = splat(ONE / weight)
    for place in range(at, at + room, WIDTH):
        store(scores, place, load(scores, place) * by)


@njit(error_model="numpy")
def _attend(
    queries: Any, held: Any, begin: int, pages: Any, table: Any, length: int, head: int, cap: Any, sinks: Any,
    out: Any, at: int,
) -> None:  # fmt: skip
    """Compute out[at :], flat, for one token at the end of its context.

    held: a flat array. This head's keys of the first page begin at `begin`; its values begin one page of all
          heads later; its keys of the page that is being written begin two pages later
    """
    dim, group, row = pages.dim, pages.group, queries.row
    page, side = (length - 1) // group, pages.heads * group * dim
    size, numbers = len(queries.block) // row, queries.heads * row
    for index in range(page + 1):
        if 0 < index < page:
            _score_codes(queries, pages, table[index], head, index * group)
            continue
        keys, first = begin + (2 * side if index else 0), index * group
        for token in range(0, min(group, length - first), size):
            count = min(size, length - first - token)
            _fill(queries.block, held, keys + token * dim, count, dim, row)
            score_block(queries, queries.plain, count, first + token)
    for m in range(queries.heads):
        sink = sinks[head * queries.heads + m] if len(sinks) else ZERO
        soften(queries.scores, m * queries.room, length, queries.room, cap, len(sinks) > 0, sink)
    sums, of_codes, of_page = (
        np.zeros(numbers, np.float32),
        np.zeros(numbers, np.float32),
        np.empty(numbers, np.float32),
    )
    for index in range(page + 1):
        if 0 < index < page:
            _add_codes(queries, pages, table[index], head, index * group, of_page, of_codes)
            continue
        values, first = begin + side + (2 * side if index else 0), index * group
        for token in range(0, min(group, length - first), size):
            count = min(size, length - first - token)
            _fill(queries.block, held, values + token * dim, count, dim, row)
            add_block(queries, count, first + token, sums)
    for m in range(queries.heads):
        if page > 1:
            rotate(of_codes, m * row, dim)
        for d in range(0, dim, WIDTH):
            store(out, at + m * dim + d, load(sums, m * row + d) + load(of_codes, m * row + d))


@njit(error_model="numpy")
def _queries_of(query: Any, at: int, count: int, dim: int, length: int, group: int, scale: Any) -> Any:
    """Load query[at :], flat, times scale, for a token whose context has `length` tokens."""
    row, room = max(dim, LEAST_ROW), -(-length // WIDTH) * WIDTH
    plain, turned = np.zeros(count * row, np.float32), np.zeros(count * row, np.float32)
    for m in range(count):
        for d in range(0, dim, WIDTH):
            q = load(query, at + m * dim + d) * splat(scale)
            store(plain, m * row + d, q)
            store(turned, m * row + d, q)
        if length > 2 * group:
            rotate(turned, m * row, dim)
    scaled, scores = np.zeros(count * row, np.float32), np.empty(count * room, np.float32)
    block = np.zeros(min(BLOCK, group // 2) * row, np.float32)
    return Queries(count, row, room, plain, turned, scaled, scores, block)


def decode(sources: str) -> Callable[..., None]:
    """sources: a digest of all source code that is compiled into the kernel, as in `compiled.py`."""

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
        pages = pages_of(key_words, value_words, channels, tokens)
        heads, group, dim = pages.heads, pages.group, pages.dim
        count, side = query.shape[1] // heads, heads * group * dim
        flat_query, flat_out, flat_held = query.reshape(-1), out.reshape(-1), held.reshape(-1)
        for unit in range(first_unit, last_unit):
            request, head = unit // heads, unit % heads
            begin = rows[request] * 4 * side + head * group * dim
            for token in range(starts[request], starts[request + 1]):
                length, at = lengths[token], (token * heads + head) * count * dim
                to = begin + (length - 1) % group * dim + (2 * side if length > group else 0)
                for d in range(dim):
                    flat_held[to + d] = key[token, head, d]
                    flat_held[to + side + d] = value[token, head, d]
                queries = _queries_of(flat_query, at, count, dim, length, group, np.float32(scale))
                _attend(
                    queries, flat_held, begin, pages, table[request], length, head,
                    np.float32(cap), sinks, flat_out, at,
                )  # fmt: skip

    return decode
