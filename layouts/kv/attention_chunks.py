"""Chunked attention as in Llama 4: a query sees only the keys of its own chunk of the context.

A chunk is served as a context of its own: with the pages that hold it, and positions that count from its
first token. Every KV format and every kernel then serves a chunk as plain attention. A scheduler's prefill
chunks, the pieces in which a prompt is computed, are something else.

With chunks of 4 tokens, a prefill chunk of tokens 2 .. 9 becomes three contexts, of which these are computed:

    tokens   0 1 2 3 | 4 5 6 7 | 8 9
                 2 3   0 1 2 3   0 1     positions in the new contexts
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...base.errors import UserError
from ...kernels.attention.options import AttentionOptions
from ...kernels.attention.prefill import TILE
from .attention_metadata import AttentionMetadata, HostMetadata
from .layer import LayerKV, Workspaces


class ChunkedLayerKV:
    """A layer's storage in any format, attended to chunk by chunk."""

    def __init__(self, storage: LayerKV, chunk: int, on_gpu: bool, workspaces: Workspaces):
        """on_gpu: whether kernels read `storage`
        workspaces: the pool's workspaces, in which layers with equal chunk sizes share a step's metadata
        """
        self.storage = storage
        self._chunk = chunk
        self._rewrite = tensors_in_chunks if on_gpu else host_in_chunks
        self._step = workspaces.get((_Step, chunk), _Step)
        # The first layer rewrites every step: a CUDA graph has the same metadata each time it is replayed.
        self._is_first = not self._step.has_layers
        self._step.has_layers = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        if self._is_first or self._step.metadata is None:
            self._step.metadata = self._rewrite(metadata, self._chunk)
        return self.storage.forward(query, key, value, self._step.metadata, options, sinks)


@dataclass
class _Step:
    """The metadata of the running step, as its first layer has rewritten it."""

    metadata: AttentionMetadata | None = None
    has_layers: bool = False


def refuse_chunk(chunk: int, page_size: int, device: torch.device) -> None:
    """Raise UserError if attention in chunks of `chunk` tokens is not supported."""
    least = TILE if device.type == "cuda" else 1
    if chunk < least or chunk % page_size:
        raise UserError(
            f"attention in chunks of {chunk} tokens needs chunks of whole pages, {page_size} tokens each"
            + (f", and of {least} tokens or more" if least > 1 else "")
            + "; choose a KV format with smaller pages, or another engine"
        )


def tensors_in_chunks(metadata: AttentionMetadata, chunk: int) -> AttentionMetadata:
    """Return the step with each chunk of a context as a context of its own, as kernels read it."""
    lengths = metadata.decode_seq_lens
    pages = chunk // metadata.page_size
    table = _pages_from(metadata.block_table, (lengths - 1).clamp(min=0) // chunk * pages, pages)
    tiles = metadata.prefill_tiles
    if tiles is not None:
        tiles, tables = _tiles_in_chunks(tiles, metadata.block_table, chunk, pages, len(table))
        table = torch.cat([table, tables])
    # Without `host`, layers read nothing but these tensors.
    return replace(
        metadata,
        block_table=table,
        decode_seq_lens=_length_in_chunk(lengths, chunk),
        seq_lens=_length_in_chunk(metadata.seq_lens, chunk),
        prefill_tiles=tiles,
        host=None,
    )


def host_in_chunks(metadata: AttentionMetadata, chunk: int) -> AttentionMetadata:
    """Return the same step for layers on the CPU, in host memory."""
    if metadata.host is None:
        raise TypeError("chunks on the CPU take metadata in host memory")
    return replace(metadata, host=_host_in_chunks(metadata.host, chunk))


def _host_in_chunks(host: HostMetadata, chunk: int) -> HostMetadata:
    pages = chunk // host.page_size
    tables, lengths, starts, rows = [], [], [0], []
    for request in host.requests():
        begin, end = request.start, request.start + request.count
        for first in range(begin // chunk * chunk, end, chunk):
            stop = min(end, first + chunk)
            tables.append(request.pages[first // host.page_size :][:pages])
            lengths.append(stop - first)
            starts.append(starts[-1] + stop - max(begin, first))
            rows.append(request.row)
    table = np.zeros((len(tables), pages), np.int32)
    for row, own in zip(table, tables, strict=True):
        row[: len(own)] = own
    return replace(
        host,
        num_prefills=len(tables) - host.num_decodes,
        block_table=table,
        seq_lens=np.array(lengths, np.int32),
        query_start_loc=np.array(starts, np.int32),
        request_rows=np.array(rows, np.int64),
    )


def _length_in_chunk(lengths: Tensor, chunk: int) -> Tensor:
    """Return the number of tokens in a context's last chunk; 0 for an empty context."""
    return torch.where(lengths > 0, (lengths - 1) % chunk + 1, lengths)


def _tiles_in_chunks(
    tiles: Tensor, block_table: Tensor, chunk: int, pages: int, first_row: int
) -> tuple[Tensor, Tensor]:
    """Cut each tile [first token, tokens, position, row] in two: up to the next chunk, and from the next
    chunk on.

    The function returns the tiles, and a block table with a row for each tile; the tiles are the step's rows
    from `first_row` on.
    """
    first, count, position, row = tiles.unbind(1)
    at = position.clamp(min=0)
    before = torch.minimum(count, chunk - at % chunk)
    # Padding has position -1, and is not cut.
    before = torch.where(position < 0, count, before)
    own = torch.arange(first_row, first_row + 2 * len(tiles), dtype=tiles.dtype, device=tiles.device)
    rows, next_rows = own.chunk(2)
    lower = torch.stack([first, before, torch.where(position < 0, position, at % chunk), rows], dim=1)
    upper = torch.stack([first + before, count - before, torch.zeros_like(at), next_rows], dim=1)
    tables = block_table[row.long()]
    page = at // chunk * pages
    shifted = [_pages_from(tables, start, pages) for start in (page, page + pages)]
    return torch.cat([lower, upper]), torch.cat(shifted)


def _pages_from(block_table: Tensor, start: Tensor, pages: int) -> Tensor:
    """Return columns start .. start + pages of each row, with any page after the row's last column."""
    columns = start.long()[:, None] + torch.arange(pages, device=block_table.device)
    return block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))
