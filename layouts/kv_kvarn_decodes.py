"""Where a step's decoding requests find their tokens in KVarN's pages on the CPU: once for all layers.

Not for what lies there, which is in `kv_kvarn_cpu.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_attention import TokenGroup
from .attention_metadata import AttentionMetadata
from .kv_cpu import DecodeGroups, on_host
from .kv_layer import Workspaces


@dataclass(frozen=True)
class DecodeGroup:
    """Requests that attend together, `b` of them.

    tokens    of the step: a slice, or int64 [b]
    rows      of `held`: a slice where they are neighbours, else int64 [b]
    held      pages that are read as they are held: one, or the first and the own one
    longest   tokens of the longest context
    coded     int64 [b, m]: the pages between
    hidden    bool [b, 1, 1, n]: tokens that are held, the own page's from G on
    bias      the same in the query's dtype, 0 or -inf; None where nothing is hidden
    own_page  int64 [b]
    """

    tokens: slice | Tensor
    rows: slice | Tensor
    held: int
    longest: int
    coded: Tensor
    hidden: Tensor
    bias: Tensor | None
    own_page: Tensor

    @cached_property
    def all_bias(self) -> Tensor:
        """fp32 [b, 1, 1, n + m * G]: 0 or -inf for what is held, and for coded pages behind it."""
        pages = self.coded.shape[1]
        later = torch.arange(1, pages + 1) >= self.own_page[:, None]
        size = self.hidden.shape[-1] // 2
        hidden = torch.cat([self.hidden, later.repeat_interleave(size, 1)[:, None, None]], -1)
        return _bias(hidden, torch.float32)


@dataclass(frozen=True)
class DecodeStep:
    """All of them.

    new    int64 [B * 2 * H_kv]: where new keys and values go, among all vectors that are held
    full   int64 [d]: rows whose own page is full with them, and the pages where it is to be written
    """

    new: Tensor
    full: tuple[Tensor, Tensor]
    groups: list[DecodeGroup]


class DecodeSteps:
    """The last step's, made by the first layer of each number of heads that asks."""

    def __init__(self, workspaces: Workspaces) -> None:
        self._groups = workspaces.get(DecodeGroups, DecodeGroups)
        self._metadata: AttentionMetadata | None = None
        self._steps: dict[int, DecodeStep] = {}

    def of(self, metadata: AttentionMetadata, kv_heads: int, query: Tensor) -> DecodeStep:
        if metadata is not self._metadata:
            self._metadata, self._steps = metadata, {}
        if kv_heads not in self._steps:
            self._steps[kv_heads] = self._step(metadata, kv_heads, query)
        return self._steps[kv_heads]

    def _step(self, metadata: AttentionMetadata, kv_heads: int, query: Tensor) -> DecodeStep:
        host = on_host(metadata)
        size, requests = host.page_size, slice(host.num_decodes)
        rows, lengths = host.request_rows[requests].astype(np.int64), host.seq_lens[requests].astype(np.int64)
        own_page, offset = np.divmod(lengths - 1, size)
        page = (rows * 2 + np.minimum(own_page, 1))[:, None] * (2 * kv_heads) + np.arange(2 * kv_heads)
        full = np.flatnonzero((own_page > 0) & (offset == size - 1))
        to = host.block_table[full, own_page[full]].astype(np.int64)
        # Without coded pages it does not matter who has how many.
        groups: Sequence[TokenGroup | None] = [None]
        if int(own_page.max()) > 1:
            groups = self._groups.of(metadata, query)
        return DecodeStep(
            torch.from_numpy((page * size + offset[:, None]).ravel()),
            (torch.from_numpy(rows[full]), torch.from_numpy(to)),
            [_group(group, rows, lengths, size, query.dtype) for group in groups],
        )


def _group(
    group: TokenGroup | None, rows: np.ndarray, lengths: np.ndarray, size: int, dtype: torch.dtype
) -> DecodeGroup:
    """Those of `group`, or all."""
    requests = np.arange(len(rows))
    if group is not None:
        requests = requests[group.tokens if isinstance(group.tokens, slice) else group.tokens.numpy()]
    # In the order of their rows: what is held need not be copied where rows are neighbours.
    order = rows[requests].argsort()
    tokens = requests[order]
    rows, lengths = rows[tokens], lengths[tokens]
    first, longest = int(rows[0]), int(lengths.max())
    own_page = (lengths - 1) // size
    held = 1 if longest <= size else 2
    seen = lengths - np.maximum(own_page - 1, 0) * size
    hidden = (np.arange(longest if held == 1 else 2 * size) >= seen[:, None])[:, None, None]
    coded = torch.empty(len(rows), 0, dtype=torch.int64)
    if group is not None:
        coded = group.pages[torch.from_numpy(order), 1 : max(group.pages.shape[1] - 1, 1)]
    in_order = np.array_equal(tokens, np.arange(int(tokens[0]), int(tokens[0]) + len(tokens)))
    return DecodeGroup(
        slice(int(tokens[0]), int(tokens[0]) + len(tokens)) if in_order else torch.from_numpy(tokens),
        slice(first, first + len(rows)) if int(rows[-1]) - first == len(rows) - 1 else torch.from_numpy(rows),
        held,
        longest,
        coded,
        torch.from_numpy(hidden),
        _bias(torch.from_numpy(hidden), dtype) if hidden.any() else None,
        torch.from_numpy(own_page),
    )


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
