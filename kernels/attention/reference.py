"""Attention over paged keys and values: the torch reference, which every GPU kernel has to equal.

Other files assign pages to requests, and handle formats that pack more than one value in a byte.

    key_pages    [pages, P, H_kv, D]       one layer's keys, P tokens to a page; 16 or 32 bit, e4m3 or int8
    value_pages  [pages, P, H_kv, D_v]
    *_scale      None; fp32 [H_kv] for e4m3, one a head; fp32 [pages, P, H_kv] for int8, one a token and head
    block_table  row b lists, in order, the pages that hold request b's tokens
    slot         page * P + offset: where one token's key and value lie

Queries come as one flat list of tokens, [T, H, D], cut into groups. A group is `b` requests with `n` query
tokens each: a decode step is a few groups with n = 1, a prefill chunk is one group (b = 1) for each prompt in
it. To attend, the pages of a group's requests are first copied side by side, whole pages at a time. The group
then attends with everything outside causality, window and length at -inf. Rows of very different lengths are
in different groups, so that a short request is never padded to a long one: the work is at most twice that of
the real tokens.

A chunk's queries attend in blocks, each over the keys that a query of the block may look at, so that
causality halves the work of a long prompt. All blocks share one bias, since the bias depends only on the
distance from a block's end.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .append_kv import quantize_reference
from .options import AttentionOptions

PADDING_WORTH_A_GROUP = 64
"""How many needlessly gathered pages cost about as much as one more group."""
QUERY_BLOCK = 256
"""How many queries of a chunk attend at once: fewer are slower per query, more read more keys needlessly."""
SLACK = 8
"""Memory for gathered pages is larger than needed by one part in this many, since contexts grow."""


@dataclass(frozen=True)
class TokenGroup:
    """`b` requests with `n` query tokens each, and the `m` pages that each request may look at."""

    tokens: slice | Tensor
    """The indices of the group's b * n tokens among all query tokens, request by request."""
    pages: Tensor
    """The pages, int64 [b, m]; page 0 fills rows of requests with fewer pages."""
    bias: Tensor
    """In the query's dtype: 0 if the query may look, -inf elsewhere. [b, 1, 1, m * P] where n = 1; of a
    chunk [1, 1, i, j], its last i queries over its last j keys."""
    num_keys: int = 0
    """For a chunk: the number of keys in its pages, its own included."""


class GatheredPages:
    """Copies of pages in memory that is used again and again: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, pages: Tensor, which: Tensor) -> Tensor:
        """Return the pages that `which` names; they are valid until the next call."""
        shape = len(which), *pages.shape[1:]
        size = math.prod(shape) * pages.itemsize
        if size > len(self._memory):
            self._memory = torch.empty(size + size // SLACK, dtype=torch.uint8)
        copy = self._memory[:size].view(pages.dtype).view(shape)
        return torch.index_select(pages, 0, which, out=copy)


def append(pages: Tensor, new: Tensor, slots: Tensor, scale: Tensor | None = None) -> None:
    """Store keys or values, [T, H_kv, D], at slots, int64 [T], quantized as the pages are."""
    stored, token_scale = quantize_reference(new, pages.dtype, scale)
    if scale is None:
        pages.view(-1, *new.shape[1:]).index_copy_(0, slots, stored)
        return
    # As bytes: torch does not copy by index what it cannot add.
    pages.view(torch.uint8).view(-1, *new.shape[1:]).index_copy_(0, slots, stored.view(torch.uint8))
    if token_scale is not None:
        scale.view(-1, new.shape[1]).index_copy_(0, slots, token_scale)


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    groups: Sequence[TokenGroup],
    options: AttentionOptions,
    gathered: tuple[GatheredPages, GatheredPages] | None = None,
) -> Tensor:
    """Attend for queries [T, H, D]; return [T, H, D_v].

    gathered: memory into which pages of keys and of values are copied; None allocates it
    """
    keys, values = gathered or (GatheredPages(), GatheredPages())

    def gather(group: TokenGroup) -> tuple[Tensor, Tensor]:
        which = group.pages.view(-1)
        key = _gather(key_pages, options.key_scale, which, query.dtype, keys)
        return key, _gather(value_pages, options.value_scale, which, query.dtype, values)

    return attend_over(query, groups, gather, options)


def attend_over(
    query: Tensor,
    groups: Sequence[TokenGroup],
    gather: Callable[[TokenGroup], tuple[Tensor, Tensor]],
    options: AttentionOptions,
) -> Tensor:
    """Attend like `attend`, over the result of `gather` for a group's pages: keys and values [b * m, P, H_kv,
    D].
    """
    if len(groups) == 1 and len(query[groups[0].tokens]) == len(query):
        return attend_group(query, *gather(groups[0]), groups[0], options)
    outputs = [attend_group(query[group.tokens], *gather(group), group, options) for group in groups]
    output = query.new_empty(*query.shape[:2], outputs[0].shape[-1])
    for group, part in zip(groups, outputs, strict=True):
        output[group.tokens] = part
    return output


def _gather(
    pages: Tensor, scale: Tensor | None, which: Tensor, dtype: torch.dtype, gathered: GatheredPages
) -> Tensor:
    """Return the pages that `which` names, [m, P, H_kv, D], in the query's dtype."""
    if scale is None:
        return gathered.copy(pages, which)
    values = pages.view(torch.uint8).index_select(0, which).view(pages.dtype).float()
    by_token = scale.ndim == 3
    return values.mul_((scale.index_select(0, which) if by_token else scale).unsqueeze(-1)).to(dtype)


def attend_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: TokenGroup,
    options: AttentionOptions,
) -> Tensor:
    """Attend with one group's queries, [b * n, H, D], to its gathered pages, [b * m, P, H_kv, D]."""
    requests, num_pages = group.pages.shape
    tokens, heads, _ = query.shape
    n = tokens // requests
    context = num_pages * key.shape[1]
    kv_heads = key.shape[2]
    key = key.reshape(requests, context, kv_heads, -1).transpose(1, 2)
    value = value.reshape(requests, context, kv_heads, -1).transpose(1, 2)
    if n == 1:  # the query heads that share a key head stand as its query tokens: keys are read once
        query = query.view(requests, kv_heads, heads // kv_heads, -1)
        return _attend(query, key, value, group.bias, options).reshape(tokens, heads, -1)
    query = query.view(requests, n, heads, -1).transpose(1, 2)
    key, value = key[:, :, : group.num_keys], value[:, :, : group.num_keys]
    if n == group.num_keys and options.is_plain:
        output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=options.scale, enable_gqa=True
        )
    else:
        output = torch.cat(
            [
                _attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], bias, options)
                for queries, keys, bias in _blocks(n, group, options.sliding_window)
            ],
            dim=2,
        )
    return output.transpose(1, 2).reshape(tokens, heads, -1)


def _blocks(n: int, group: TokenGroup, window: int | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the blocks of a chunk of n queries: which queries attend together, over which keys, and their
    bias.
    """
    for first in range(0, n, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, n)
        end = group.num_keys - (n - last)
        begin = 0 if window is None else max(0, end - (last - first) - window + 1)
        yield slice(first, last), slice(begin, end), group.bias[:, :, first - last :, begin - end :]


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, options: AttentionOptions) -> Tensor:
    """Attend with tensors [b, heads, …]."""
    if options.softcap is not None or options.sinks is not None:
        return softmax_by_hand(query, key, value, bias, options)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=options.scale, enable_gqa=query.shape[1] > key.shape[1]
    )


def softmax_by_hand(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute attention with the options that torch's own attention lacks: soft-capped scores, and sinks.
    Tensors are [b, heads, …].
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    products = torch.matmul(query, key.transpose(2, 3)).float()
    return torch.matmul(probabilities(products, bias, options).to(value.dtype), value)


def probabilities(products: Tensor, bias: Tensor, options: AttentionOptions) -> Tensor:
    """Return the probabilities from queries' products with keys, fp32 [b, heads, n, keys], leaving out the
    probabilities of sinks.
    """
    scores = products * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores, sinks = scores + bias, options.sinks
    if sinks is None:
        return scores.softmax(dim=-1)
    # [H] lies as [kv heads, queries of the group] in a decode step and as [heads, 1] in a prefill chunk.
    column = sinks.float().view(1, scores.shape[1], -1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]


def decode_groups(
    block_table: np.ndarray, lengths: np.ndarray, page_size: int, window: int | None, like: Tensor
) -> list[TokenGroup]:
    """Group one query token per request, its key already stored: lengths, int [B], count it.

    block_table: int [B, at least the pages of the longest]
    like:        a tensor of the query's dtype and device.
    """
    first_page = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0) // page_size
    counts = (lengths + page_size - 1) // page_size - first_page
    groups = []
    for rows in _rows_of_like_size(counts):
        chosen = slice(None) if rows is None else rows
        first, most = first_page[chosen], int(counts[chosen].max())
        groups.append(
            TokenGroup(
                tokens=slice(0, len(lengths)) if rows is None else torch.from_numpy(rows).to(like.device),
                pages=_page_window(block_table[chosen], first, most, like),
                bias=_bias(lengths[chosen, None] - 1, first, most, page_size, window, like),
            )
        )
    return groups


def _rows_of_like_size(counts: np.ndarray) -> list[np.ndarray] | list[None]:
    """Group rows whose page counts round up to the same power of two; [None], all rows, if groups would save
    little.
    """
    if len(counts) * int(counts.max()) - int(counts.sum()) <= PADDING_WORTH_A_GROUP:
        return [None]
    size_class = np.ceil(np.log2(counts))
    return [np.flatnonzero(size_class == one_class) for one_class in np.unique(size_class)]


def prefill_group(
    first_token: int,
    start: int,
    count: int,
    block_row: np.ndarray,
    page_size: int,
    window: int | None,
    like: Tensor,
) -> TokenGroup:
    """Return a group of tokens start .. start + count of one prompt; in the chunk they begin at
    first_token.
    """
    first_page = 0 if window is None else max(start - window + 1, 0) // page_size
    first, end = np.array([first_page]), start + count
    num_pages = (end + page_size - 1) // page_size - first_page
    pages = _page_window(block_row[None], first, num_pages, like)
    tokens = slice(first_token, first_token + count)
    if count == 1:
        bias = _bias(np.array([[start]]), first, num_pages, page_size, window, like)
        return TokenGroup(tokens, pages, bias)
    num_keys, rows = end - first_page * page_size, min(count, QUERY_BLOCK)
    seen = num_keys if window is None else min(num_keys, rows + window - 1)
    # In a page of one token, which is what positions are counted in here.
    bias = _bias(np.arange(end - rows, end)[None], np.array([end - seen]), seen, 1, window, like)
    return TokenGroup(tokens, pages, bias, num_keys)


def _page_window(block_table: np.ndarray, first_page: np.ndarray, count: int, like: Tensor) -> Tensor:
    """Return columns first_page .. first_page + count of each row, page 0 past the row's end."""
    if not first_page.any():
        pages = np.ascontiguousarray(block_table[:, :count])
    else:
        columns = first_page[:, None] + np.arange(count)
        inside = columns < block_table.shape[1]
        rows = np.arange(len(block_table))[:, None]
        pages = np.where(inside, block_table[rows, np.where(inside, columns, 0)], 0)
    return torch.from_numpy(pages).to(like.device)


def _bias(
    positions: np.ndarray,
    first_page: np.ndarray,
    num_pages: int,
    page_size: int,
    window: int | None,
    like: Tensor,
) -> Tensor:
    """Return [b, 1, n, j]: 0 if the query at `positions` [b, n] may look at key first_page * P + j, else
    -inf.
    """
    keys = first_page[:, None, None] * page_size + np.arange(num_pages * page_size)
    visible = keys <= positions[..., None]
    if window is not None:
        visible &= keys > positions[..., None] - window
    hidden = torch.from_numpy(~visible).to(like.device)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)[
        :, None
    ]
