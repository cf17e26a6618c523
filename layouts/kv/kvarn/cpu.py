"""One layer's KVarN pages on the CPU. The kernels themselves are in `kernels/attention/kvarn/`."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention import reference
from ....kernels.attention.kvarn.cpu.compiled import kernels, numbers
from ....kernels.attention.options import AttentionOptions
from ....kernels.attention.reference import TokenGroup
from ..attention_metadata import AttentionMetadata, RequestTokens
from ..cpu import on_host, with_padding
from ..layer import Workspaces, widened
from ..threads import Threads
from .steps import Run, Steps
from .storage import KVarNStorage


class KVarNCpuLayerKV:
    """One layer on the CPU."""

    def __init__(self, storage: KVarNStorage, workspaces: Workspaces):
        self.storage = storage
        self._steps = workspaces.get(Steps, Steps)
        self._threads = workspaces.get(Threads, Threads)
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
        options = replace(options, sinks=sinks)
        for run in step.runs:
            self._decode(run, step.lengths, (query, key, value, output), options)
        for chunk, groups in step.prompts:
            tokens = slice(chunk.first_token, chunk.first_token + chunk.count)
            of_chunk = query[tokens], key[tokens], value[tokens], output[tokens]
            self._prefill(chunk, groups, *of_chunk, options)
        return with_padding(output[..., :value_dim], padded)

    def _decode(
        self,
        run: Run,
        lengths: np.ndarray,
        tokens: tuple[Tensor, ...],
        options: AttentionOptions,
    ) -> None:
        """Store a run's tokens, attend, and quantize the pages that are full afterwards.

        tokens: the step's query, key, value and output tensors
        """
        heads, group, dim = self.storage.held.shape[3:]
        sinks = options.sinks
        logits = np.empty(0, np.float32) if sinks is None else sinks.detach().float().numpy()
        before = *map(numbers, tokens), self._held, *self._pages, run.table, run.rows, run.starts, lengths
        behind = options.scale, options.softcap or 0.0, logits
        shares = run.shares(heads, dim)
        self._threads.call([partial(self._kernels.decode, *before, *units, *behind) for units in shares])
        held, strides = self.storage.held, (group * dim, dim)
        self._threads.call([partial(self._code_page, held[row, 1], strides, page) for row, page in run.full])

    def _code_page(self, tokens: Tensor, strides: tuple[int, int], page: int) -> None:
        """Quantize a full page.

        tokens: the run's keys and values [2, ...], each contiguous
        strides: elements from one head to the next, and from one token to the next
        """
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
    ) -> None:
        """Attend for one prefill chunk, page by page, over dequantized earlier pages."""
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
            output[group.tokens] = reference.attend_group(
                query[group.tokens], seen[:1, :stop], seen[1:, :stop], group, options
            )
            for page in range(max(start // size, 1), stop // size):
                of_page = seen[:, page * size : (page + 1) * size]
                self._code_page(of_page, (dim, heads * dim), int(chunk.pages[page]))
                if stop < end:
                    self._read_pages(chunk.pages[page : page + 1], of_page)
            start = stop

    def _read_pages(self, pages: np.ndarray, seen: Tensor) -> None:
        """Write the dequantized pages [n] to seen, [2, n * G, H_kv, D]."""
        self._kernels.read_pages(np.ascontiguousarray(pages), *map(numbers, seen), *self._pages)
