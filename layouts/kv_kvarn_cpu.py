"""One layer's KVarN pages on the CPU. Not for the kernels, which are in `kernels/low_bit_kv/`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels import paged_attention
from ..kernels.low_bit_kv.kvarn_cpu import kernels, numbers
from ..kernels.paged_attention import AttentionOptions, TokenGroup
from .attention_metadata import AttentionMetadata, HostMetadata, RequestTokens
from .kv_cpu import on_host, with_padding
from .kv_kvarn_storage import KVarNStorage
from .kv_layer import Workspaces, widened


@dataclass(frozen=True)
class Run:
    """Requests that the decode kernel takes in one call, with tokens of one page each; as it takes them."""

    table: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    full: list[tuple[int, int]]
    """The row and the page of those whose own page is full with them, unless that is their first one."""
    work: np.ndarray
    """int64 [R + 1]: tokens that are attended to by those before."""

    @classmethod
    def of(cls, host: HostMetadata, requests: slice, starts: np.ndarray, lengths: np.ndarray) -> "Run":
        table, rows = np.ascontiguousarray(host.block_table[requests]), host.request_rows[requests].copy()
        own_page, offset = np.divmod(lengths[starts[1:] - 1] - 1, host.page_size)
        full = np.flatnonzero((own_page > 0) & (offset == host.page_size - 1))
        work = np.concatenate([[0], np.cumsum(lengths)])[starts]
        return cls(
            table, rows, starts, [(int(rows[r]), int(table[r, own_page[r]])) for r in full], work - work[0]
        )


@dataclass(frozen=True)
class Step:
    """What all layers of a step have in common."""

    lengths: np.ndarray
    """int64 [T], of each token's context."""
    runs: list[Run]
    prompts: list[tuple[RequestTokens, list[TokenGroup]]]
    """Chunks, and those of a chunk's tokens that attend together."""


class Steps:
    """The last step's, made by the first layer that asks."""

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
        runs.append(Run.of(host, slice(decodes), np.arange(decodes + 1), lengths))
    if metadata.numerics == "tuned":
        prompts = [(chunk, list(_groups(chunk, host.page_size, query))) for chunk in host.requests(decodes)]
    else:
        # As if they were decoded, since kernels for prompts sum in another order.
        for index, chunk in enumerate(host.requests(decodes), start=decodes):
            for starts in _within_pages(chunk, host.page_size):
                runs.append(Run.of(host, slice(index, index + 1), starts, lengths))
    return Step(lengths, runs, prompts)


def _within_pages(chunk: RequestTokens, size: int) -> Iterator[np.ndarray]:
    """int64 [2]: where those of a chunk's tokens begin and end that lie on one page."""
    start, end = chunk.start, chunk.start + chunk.count
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield np.array([start, stop]) + (chunk.first_token - chunk.start)
        start = stop


def _groups(chunk: RequestTokens, size: int, query: Tensor) -> Iterator[TokenGroup]:
    """The tokens of each page; those of the first two together, which both see nothing but what is held."""
    start, end = chunk.start, chunk.start + chunk.count
    while start < end:
        stop = min(end, max(start // size + 1, 2) * size)
        yield paged_attention.prefill_group(
            start - chunk.start, start, stop - start, np.zeros(1, np.int32), stop, None, query
        )
        start = stop


class KVarNCpuLayerKV:
    """One layer on the CPU."""

    def __init__(self, storage: KVarNStorage, workspaces: Workspaces):
        self.storage = storage
        self._steps = workspaces.get(Steps, Steps)
        self._kernels = kernels(storage.held.dtype)
        self._held = numbers(storage.held)
        self._pages = tuple(numbers(part) for part in vars(storage.pages).values())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        count, padded, value_dim = on_host(metadata).num_tokens, len(query), value.shape[2]
        query, key, value = (widened(x[:count], self.storage.dim).contiguous() for x in (query, key, value))
        step, output = self._steps.of(metadata, query), torch.empty_like(query)
        for run in step.runs:
            self._decode(run, step.lengths, (query, key, value, output), options, sinks)
        for chunk, groups in step.prompts:
            tokens = slice(chunk.first_token, chunk.first_token + chunk.count)
            of_chunk = query[tokens], key[tokens], value[tokens], output[tokens]
            self._prefill(chunk, groups, *of_chunk, options, sinks)
        return with_padding(output[..., :value_dim], padded)

    def _decode(
        self,
        run: Run,
        lengths: np.ndarray,
        tokens: tuple[Tensor, ...],
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> None:
        """Store a run's tokens, attend, and code the pages that are full then.

        tokens: query, key, value and output of the step
        """
        heads, group, dim = self.storage.held.shape[3:]
        logits = np.empty(0, np.float32) if sinks is None else sinks.float().numpy()
        before = *map(numbers, tokens), self._held, *self._pages, run.table, run.rows, run.starts, lengths
        self._kernels.decode(*before, 0, len(run.rows) * heads, options.scale, options.softcap or 0.0, logits)
        for row, page in run.full:
            self._code_page(self.storage.held[row, 1], (group * dim, dim), page)

    def _code_page(self, tokens: Tensor, strides: tuple[int, int], page: int) -> None:
        """tokens: keys and values [2, ...], each contiguous; strides: from head to head and token to token"""
        key, value = (numbers(side.view(-1)) for side in tokens)
        self._kernels.code_page(key, value, 0, 0, *strides, page, *self._pages)

    def _prefill(
        self,
        chunk: RequestTokens,
        groups: list[TokenGroup],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> None:
        """One chunk, page by page, over the pages before as codes give them back."""
        held, start, end = self.storage.held[chunk.row], chunk.start, chunk.start + chunk.count
        _, _, heads, size, dim = held.shape
        first_page, last_page = start // size, (end - 1) // size
        seen = key.new_empty(2, end, heads, dim)
        seen[0, start:], seen[1, start:] = key, value
        if first_page:
            seen[:, :size] = held[0].transpose(1, 2)
        if first_page > 1:
            self._read_pages(chunk.pages[1:first_page], seen[:, size : first_page * size])
        begin = first_page * size
        seen[:, begin:start] = held[min(first_page, 1), :, :, : start - begin].transpose(1, 2)
        if first_page == 0:
            held[0, :, :, start : min(end, size)] = seen[:, start : min(end, size)].transpose(1, 2)
        if last_page:
            begin = last_page * size
            held[1, :, :, max(start - begin, 0) : end - begin] = seen[:, max(start, begin) :].transpose(1, 2)
        for group in groups:
            stop = start + len(query[group.tokens])
            output[group.tokens] = paged_attention.attend_group(
                query[group.tokens], seen[:1, :stop], seen[1:, :stop], group, options, sinks
            )
            for page in range(max(start // size, 1), stop // size):
                of_page = seen[:, page * size : (page + 1) * size]
                self._code_page(of_page, (dim, heads * dim), int(chunk.pages[page]))
                if stop < end:
                    self._read_pages(chunk.pages[page : page + 1], of_page)
            start = stop

    def _read_pages(self, pages: np.ndarray, seen: Tensor) -> None:
        """Write pages [n] as codes give them back to seen [2, n * G, H_kv, D]."""
        self._kernels.read_pages(np.ascontiguousarray(pages), *map(numbers, seen), *self._pages)
