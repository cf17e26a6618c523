"""One layer's KVarN pages on a GPU. The kernels themselves are in `kernels/attention/kvarn/`."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.choose_prefill import attend_prefill
from ....kernels.attention.decode import DecodeWorkspace
from ....kernels.attention.kvarn.decode import kvarn_decode, plain_splits
from ....kernels.attention.kvarn.flush import addresses, flush_decoded, flush_prompts
from ....kernels.attention.kvarn.held import append_held, hold
from ....kernels.attention.kvarn.prefill import kvarn_prefill
from ....kernels.attention.kvarn.widen import widen_kvarn
from ....kernels.attention.options import AttentionOptions
from ....kernels.attention.prefill import tiles_of
from ..attention_metadata import AttentionMetadata, HostMetadata
from ..cuda import to_device
from ..layer import KVShape, PoolSize, Workspaces, by_token, widened
from ..side_stream import SideStream
from .storage import KVarNStorage


class KVarNLayers:
    """All layers of a pool. In each step, the first layer writes the full pages of all layers."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.storages: list[KVarNStorage] = []
        self.written = torch.full((rows,), -1, dtype=torch.int32, device=device)
        """By row, the last page of a prompt if the prompt filled it: that page is written already."""
        self._addresses: Tensor | None = None

    def flush(self, metadata: AttentionMetadata) -> None:
        """Write the pages that decoding requests have just left, before their rows take the next token."""
        first = self.storages[0]
        if self._addresses is None:
            self._addresses = addresses(
                [(storage.pages, storage.held) for storage in self.storages], first.held.device
            )
        flush_decoded(
            self._addresses,
            metadata.decode_seq_lens,
            metadata.request_rows,
            metadata.block_table,
            first.held,
            self.written,
            first.value_bits,
        )


class PlainPages:
    """The dequantized pages that a step's prefill chunks see, laid out by the first layer that asks.

    A query sees its own page and the first page unquantized, and the pages between them quantized. Each page
    of a chunk is therefore a context of its own, with a row of its own in a block table.
    """

    def __init__(self) -> None:
        self._host: HostMetadata | None = None
        self._on_device: tuple[Tensor, Tensor, Tensor] | None = None

    def of(self, host: HostMetadata, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return spans for `widen_kvarn`, a block table with the indices of these spans, and tiles; all are
        int32.

        num_tokens: number of tokens in this step, padding included
        """
        if self._on_device is None or host is not self._host:
            self._host = host
            spans, table, tiles = (
                to_device(torch.from_numpy(part), device) for part in spans_and_tables(host, num_tokens)
            )
            self._on_device = spans, table, tiles
        return self._on_device


def spans_and_tables(host: HostMetadata, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the result of `PlainPages.of` in host memory."""
    group = host.page_size
    spans: list[tuple[int, ...]] = []
    tables: list[list[int]] = []
    pieces: list[tuple[int, int, int]] = []
    for chunk in host.requests(host.num_decodes):
        end = chunk.start + chunk.count
        own = (chunk.row, chunk.start, end, chunk.first_token)

        def plain(page: int, own: tuple[int, int, int, int] = own) -> int:
            row, start, end, first_token = own
            spans.append((-1, row, page * group, start, end, first_token))
            return len(spans) - 1

        first, last = chunk.start // group, (end - 1) // group
        seen = [plain(0)]
        for page in range(1, last):
            seen.append(len(spans))
            spans.append((int(chunk.pages[page]), *own[:1], page * group, *own[1:]))
        for page in range(first, last + 1):
            begin, stop = max(chunk.start, page * group), min(end, (page + 1) * group)
            pieces.append((stop - begin, begin, len(tables)))
            tables.append([*seen[:page], plain(page)] if page else seen[:1])
    # A step of padding alone, as warm-up has it, reads a page as well.
    spans, tables = spans or [(-1, 0, 0, 0, 0, 0)], tables or [[0]]
    table = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, seen in zip(table, tables, strict=True):
        row[: len(seen)] = seen
    tiles = tiles_of(host.num_decodes, pieces, num_tokens - host.num_tokens)
    return np.array(spans, np.int32), table, tiles


class KVarNCudaLayerKV:
    """One layer on a GPU."""

    def __init__(self, storage: KVarNStorage, shape: KVShape, size: PoolSize, workspaces: Workspaces):
        self.storage = storage
        self._layers = workspaces.get(
            (KVarNLayers, shape.heads, shape.key_dim, storage.value_bits),
            lambda: KVarNLayers(len(storage.held), storage.held.device),
        )
        self._layers.storages.append(storage)
        heads, max_context = shape.query_heads, size.max_pages * size.page_size
        further, device = plain_splits(storage.group_size), storage.held.device
        self._workspace = workspaces.get(
            (DecodeWorkspace, heads, shape.key_dim, further),
            lambda: DecodeWorkspace.allocate(
                size.max_requests, heads, shape.key_dim, max_context, device, further
            ),
        )
        self._plain_pages = workspaces.get(PlainPages, PlainPages)
        self._beside = workspaces.get(SideStream, lambda: SideStream(device))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        storage, value_dim = self.storage, value.shape[2]
        if self._layers.storages[0] is storage:
            self._layers.flush(metadata)
        query, key, value = (by_token(widened(x, storage.dim)) for x in (query, key, value))
        query = query.contiguous()
        output = torch.empty_like(query)
        options = replace(options, sinks=sinks)
        tiles = metadata.prefill_tiles
        decodes = metadata.host is None or metadata.host.num_decodes > 0
        if tiles is not None and decodes:
            # A small step's few pages leave most of a GPU free, and take as long as decoding does.
            self._beside.run(lambda: self._write_pages(key, value, metadata))
        elif tiles is not None:
            self._write_pages(key, value, metadata)
        if decodes:
            self._decode(query, key, value, metadata, output, options)
        if tiles is not None and decodes:
            self._beside.join()
        if tiles is not None:
            self._prefill(query, key, value, metadata, tiles, output, options)
        return output[..., :value_dim]

    def _write_pages(self, key: Tensor, value: Tensor, metadata: AttentionMetadata) -> None:
        """Write the pages that a step's prefill chunks fill."""
        storage = self.storage
        where = metadata.positions, metadata.slot_mapping, metadata.token_rows, metadata.decode_seq_lens
        flush_prompts(key, value, *where, storage.held, storage.pages, storage.value_bits)

    def _decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        output: Tensor,
        options: AttentionOptions,
    ) -> None:
        storage, lengths = self.storage, metadata.decode_seq_lens
        # Zeros for requests that do not decode; those of prompts are written over.
        rows = min(len(query), len(lengths))
        turned_q = torch.empty((rows, *query.shape[1:]), dtype=torch.float16, device=query.device)
        append_held(
            query, key, value, metadata.positions, metadata.token_rows, lengths, storage.held, turned_q
        )
        kvarn_decode(
            query[:rows],
            turned_q,
            storage.pages,
            storage.held,
            metadata.block_table,
            lengths,
            metadata.request_rows,
            self._workspace,
            value_bits=storage.value_bits,
            options=options,
            out=output[:rows],
        )

    def _prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        tiles: Tensor,
        output: Tensor,
        options: AttentionOptions,
    ) -> None:
        storage = self.storage
        pages, held, value_bits = storage.pages, storage.held, storage.value_bits
        # Where bits are kept large steps are computed as small ones are.
        host = metadata.host if metadata.batch_invariance == "tuned" else None
        if host is not None:
            # A step so large that it is no graph reads each page many times: it is decoded once.
            spans, table, tiles = self._plain_pages.of(host, len(query), query.device)
            plain = widen_kvarn(spans, key, value, pages, held, value_bits)
            attend_prefill(query, *plain, table, tiles, options, output, one_form=False)
        else:
            kvarn_prefill(
                query,
                key,
                value,
                pages,
                held,
                metadata.block_table,
                tiles,
                metadata.seq_lens,
                metadata.query_start_loc,
                metadata.request_rows,
                value_bits=value_bits,
                options=options,
                out=output,
            )
        where = metadata.positions, metadata.slot_mapping, metadata.token_rows, metadata.decode_seq_lens
        hold(key, value, *where, held, self._layers.written)
