"""A step's tokens in the form of KVarN's CPU kernels, prepared once for all layers.

`cpu.py` runs the kernels.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention import reference
from ....kernels.attention.reference import TokenGroup
from ..attention_metadata import AttentionMetadata, HostMetadata, RequestTokens
from ..cpu import on_host

LEAST_SHARE = 1 << 20
"""The least work for another thread, in elements of keys: with their values they take 300 us."""


@dataclass(frozen=True)
class Run:
    """Requests that the decode kernel handles in one call; each request's tokens are of one page."""

    table: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    full: list[tuple[int, int]]
    """Row and page of each request whose current page these tokens fill, unless it is its first page."""
    work: np.ndarray
    """int64 [R + 1]: for each request, the total context length of all requests before it."""

    @classmethod
    def of(cls, host: HostMetadata, requests: slice, starts: np.ndarray, lengths: np.ndarray) -> "Run":
        table, rows = np.ascontiguousarray(host.block_table[requests]), host.request_rows[requests].copy()
        own_page, offset = np.divmod(lengths[starts[1:] - 1] - 1, host.page_size)
        full = np.flatnonzero((own_page > 0) & (offset == host.page_size - 1))
        work = np.concatenate([[0], np.cumsum(lengths)])[starts]
        return cls(
            table, rows, starts, [(int(rows[r]), int(table[r, own_page[r]])) for r in full], work - work[0]
        )

    def shares(self, heads: int, dim: int) -> list[tuple[int, int]]:
        """Return ranges of units, which are pairs of a request and a head: one range for each thread."""
        threads = 1 + min(torch.get_num_threads() - 1, int(self.work[-1]) * heads * dim // LEAST_SHARE)
        if threads == 1:
            return [(0, heads * len(self.rows))]
        at, units = np.linspace(0, self.work[-1], threads + 1), heads * np.arange(len(self.work))
        bounds = np.interp(at, self.work, units).round().astype(int).tolist()
        return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class Step:
    """The data of a step that all layers share."""

    lengths: np.ndarray
    """int64 [T]: the length of each token's context."""
    runs: list[Run]
    prompts: list[tuple[RequestTokens, list[TokenGroup]]]
    """Prefill chunks, each with the groups of its tokens that attend together."""


class Steps:
    """The last step, prepared by the first layer that asks."""

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._step: Step | None = None

    def of(self, metadata: AttentionMetadata, query: Tensor) -> Step:
        if self._step is None or metadata is not self._metadata:
            self._metadata, self._step = metadata, _step(metadata, query)
        return self._step


def _step(metadata: AttentionMetadata, query: Tensor) -> Step:
    host = on_host(metadata)
    lengths = metadata.positions.numpy() + 1
    runs, prompts, decodes = [], [], host.num_decodes
    if decodes:
        runs.append(Run.of(host, slice(decodes), np.arange(decodes + 1, dtype=np.int64), lengths))
    if metadata.batch_invariance == "tuned":
        prompts = [(chunk, list(_groups(chunk, host.page_size, query))) for chunk in host.requests(decodes)]
    else:
        # As decoded tokens, since prefill kernels sum in another order.
        for index, chunk in enumerate(host.requests(decodes), start=decodes):
            for starts in _within_pages(chunk, host.page_size):
                runs.append(Run.of(host, slice(index, index + 1), starts, lengths))
    return Step(lengths, runs, prompts)


def _within_pages(chunk: RequestTokens, size: int) -> Iterator[np.ndarray]:
    """Return, for each page, int64 [2]: where a chunk's tokens of that page begin and end in the step."""
    start, end = chunk.start, chunk.start + chunk.count
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield np.array([start, stop], np.int64) + (chunk.first_token - chunk.start)
        start = stop


def _groups(chunk: RequestTokens, size: int, query: Tensor) -> Iterator[TokenGroup]:
    """Yield the tokens of each page as a group. The first two pages are one group: their tokens see no
    quantized tokens.
    """
    start, end = chunk.start, chunk.start + chunk.count
    while start < end:
        stop = min(end, max(start // size + 1, 2) * size)
        yield reference.prefill_group(
            start - chunk.start, start, stop - start, np.zeros(1, np.int32), stop, None, query
        )
        start = stop
