"""Stages a step: the arrays that say which tokens the model computes, and where keys and values are stored.

Decode-only, prefill-only and mixed batches are staged in the same way. On the CPU the model reads the staged
arrays. On a GPU the arrays are in pinned memory, and one copy takes them to static addresses, where CUDA
graphs read them. Two steps can be staged, so that the host need not wait for the copy of the previous one.

    | padding | arrays of this step's shape | block table: int32 [rows of the pool, W], then unused rows |
              ^ first byte                  ^ always at the same address

A copy goes from the first byte of a shape's arrays to the end of the block table's used rows.
"""

import functools
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...base.batch_invariance import BatchInvariance
from ...kernels.attention.prefill import TILE, tiles_of
from ...layouts.kv.attention_metadata import AttentionMetadata, HostMetadata
from .scheduler import MOST_SCORED, PrefillChunk
from .sequence import Sequence

ALIGNMENT = 16
"""The alignment of arrays in bytes, which compiled kernels assume for every array of every shape."""
SHAPES_REMEMBERED = 256


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step's arrays. A CUDA graph is captured for each shape."""

    num_tokens: int
    """T, the number of tokens, padding included."""
    num_requests: int
    """R, the number of requests."""
    num_logits: int
    """L, the number of tokens whose logits are computed."""
    num_tiles: int = 0
    """N, the number of tiles of prefill attention."""
    decode_only: bool = False
    """Whether all requests decode: then T = R = L, and arrays with equal content share memory."""


@dataclass(frozen=True, eq=False)
class StepInput:
    """The inputs of the model and the sampler in one step."""

    token_ids: Tensor
    """int64 [T]; negative if the token is not on the host yet. It is then the last one drawn for its row."""
    attention: AttentionMetadata
    logits_indices: Tensor | None
    """int64 [L]: tokens whose logits are computed; None for all."""
    sample_rows: Tensor
    """int64 [L]: the row of the request that each of these tokens belongs to; `max_requests` for padding."""
    sample_positions: Tensor
    """int64 [L]: the positions of the tokens to be drawn."""


A = TypeVar("A")


@dataclass(frozen=True, eq=False)
class _Arrays(Generic[A]):
    """The arrays of one shape, numpy's or torch's, with fields as in StepInput and AttentionMetadata."""

    token_ids: A
    positions: A
    slot_mapping: A
    token_rows: A
    sample_positions: A
    request_rows: A
    sample_rows: A
    logits_indices: A
    seq_lens: A
    decode_seq_lens: A
    query_start_loc: A
    tiles: A
    block_table: A


def _sizes(shape: StepShape) -> dict[str, tuple[str, int]]:
    """Return the dtype and number of elements of each array in the memory of this shape."""
    tokens, requests, logits = shape.num_tokens, shape.num_requests, shape.num_logits
    sizes = dict.fromkeys(("token_ids", "positions", "slot_mapping", "token_rows"), ("int64", tokens))
    sizes |= {"sample_positions": ("int64", logits), "seq_lens": ("int32", requests)}
    if not shape.decode_only:
        sizes |= {"request_rows": ("int64", requests), "sample_rows": ("int64", logits)}
        sizes |= {"logits_indices": ("int64", logits), "decode_seq_lens": ("int32", requests)}
        sizes |= {"query_start_loc": ("int32", requests + 1), "tiles": ("int32", 4 * shape.num_tiles)}
    return sizes


def _num_bytes(dtype: str, count: int) -> int:
    """Return the size of an array in bytes, rounded up so that the next array is aligned."""
    return -(-count * int(dtype[3:]) // 8 // ALIGNMENT) * ALIGNMENT


class StepBuffers:
    """Memory for staging steps of at most `max_tokens` tokens, and of as many requests as there are rows."""

    def __init__(
        self,
        block_table: np.ndarray,
        page_size: int,
        max_tokens: int,
        device: torch.device,
        static: bool,
        batch_invariance: BatchInvariance = "tuned",
    ):
        """block_table:      the pool's block table, int32 [rows, W]
        static:           copy steps to static addresses on `device`; otherwise they are read in place
        batch_invariance: the mode of attention
        """
        self._batch_invariance = batch_invariance
        self.pool_table = block_table
        self.page_size = page_size
        self.static = static
        rows, width = block_table.shape
        self.no_row = rows
        """The row of padding."""
        self._row_bytes = 4 * width
        decode, mixed = self.decode_shape(rows), self.shape(max_tokens, rows, rows + MOST_SCORED)
        self._table_at = max(
            sum(_num_bytes(*size) for size in _sizes(shape).values()) for shape in (decode, mixed)
        )
        size = self._table_at + rows * self._row_bytes
        copies = 2 if static else 1
        self._staging = [torch.zeros(size, dtype=torch.uint8, pin_memory=static) for _ in range(copies)]
        self._copied = [torch.cuda.Event() for _ in range(copies)] if static else []
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if static else self._staging[0]
        self._turn = 0
        self._counting = np.arange(rows + 1, dtype=np.int32)
        self._device_counting = torch.from_numpy(self._counting).to(device)
        remembered = functools.lru_cache(SHAPES_REMEMBERED)
        self._first_byte = remembered(self._find_first_byte)
        self._staged = remembered(self._carve_staging)
        self._on_device = remembered(self._carve_device)

    def decode_shape(self, num_requests: int) -> StepShape:
        """Return the shape of a decode-only batch: one query token for each request."""
        return StepShape(num_requests, num_requests, num_requests, decode_only=True)

    def shape(self, num_tokens: int, num_requests: int, num_logits: int) -> StepShape:
        """Return the shape of any other batch."""
        # Each chunk, and the padding, may end in a partly filled tile.
        tiles = num_tokens // TILE + min(num_tokens, num_requests) + 1 if self.static else 0
        return StepShape(num_tokens, num_requests, num_logits, tiles)

    def stage(self, decode: Rows[Sequence], prefill: Rows[PrefillChunk], shape: StepShape) -> HostMetadata:
        """Fill host memory with one token for each decoding request, the chunks, and padding."""
        if self.static:
            self._turn = 1 - self._turn
            self._copied[self._turn].synchronize()
        arrays = self._staged(shape, self._turn)
        if decode:
            self._stage_decodes(arrays, decode, shape)
        tokens, logits = self._stage_chunks(arrays, len(decode), prefill)
        requests = len(decode) + len(prefill)
        decodes = len(decode) + sum(chunk.is_replay for chunk in prefill)
        if tokens < shape.num_tokens or requests < shape.num_requests or logits < shape.num_logits:
            self._pad(arrays, tokens, requests, logits, shape)
        if shape.num_tiles:
            chunks = [
                (chunk.count, chunk.start, index)
                for index, chunk in enumerate(prefill, len(decode))
                if not chunk.is_replay
            ]
            tiles = tiles_of(decodes, chunks, shape.num_tokens - tokens)
            arrays.tiles[: len(tiles)] = tiles
            arrays.tiles[len(tiles) :] = 0
        return HostMetadata(
            decodes,
            requests - decodes,
            tokens,
            arrays.block_table,
            arrays.seq_lens,
            arrays.query_start_loc,
            arrays.request_rows,
            self.page_size,
        )

    def send(self, shape: StepShape, num_requests: int) -> None:
        """Copy the step staged last to the device; `num_requests` does not count padding."""
        if not self.static:
            return
        # One contiguous range: any other copy would make the host wait.
        first = self._first_byte(shape)
        last = self._table_at + num_requests * self._row_bytes
        self._device[first:last].copy_(self._staging[self._turn][first:last], non_blocking=True)
        self._copied[self._turn].record()

    def input(self, shape: StepShape, host: HostMetadata | None) -> StepInput:
        """Return the inputs on the device, as they are once the step is sent.

        host: the staged metadata; None for a capture
        """
        arrays = self._on_device(shape)
        metadata = AttentionMetadata(
            slot_mapping=arrays.slot_mapping,
            positions=arrays.positions,
            token_rows=arrays.token_rows,
            block_table=arrays.block_table,
            seq_lens=arrays.seq_lens,
            decode_seq_lens=arrays.decode_seq_lens,
            query_start_loc=arrays.query_start_loc,
            request_rows=arrays.request_rows,
            prefill_tiles=arrays.tiles if shape.num_tiles else None,
            page_size=self.page_size,
            host=host,
            batch_invariance=self._batch_invariance,
        )
        logits_indices = None if shape.decode_only else arrays.logits_indices
        return StepInput(
            arrays.token_ids, metadata, logits_indices, arrays.sample_rows, arrays.sample_positions
        )

    def _stage_decodes(self, arrays: _Arrays[np.ndarray], decode: Rows[Sequence], shape: StepShape) -> None:
        count, page_size = len(decode), self.page_size
        lengths = [len(sequence.tokens) for sequence in decode]
        seq_lens = np.array(lengths, np.int64)
        rows = np.array([sequence.row for sequence in decode], np.int64)
        positions = seq_lens - 1
        width = -(-max(lengths) // page_size)
        table = self.pool_table[rows, :width]
        arrays.block_table[:count, :width] = table
        numbers, offsets = np.divmod(positions, page_size)
        pages = table[self._counting[:count], numbers].astype(np.int64)
        arrays.token_ids[:count] = [sequence.tokens[-1] for sequence in decode]
        arrays.positions[:count] = positions
        arrays.slot_mapping[:count] = pages * page_size + offsets
        arrays.token_rows[:count] = rows
        arrays.sample_positions[:count] = seq_lens
        arrays.seq_lens[:count] = seq_lens
        if not shape.decode_only:
            arrays.request_rows[:count] = rows
            arrays.sample_rows[:count] = rows
            arrays.decode_seq_lens[:count] = seq_lens
            arrays.query_start_loc[: count + 1] = self._counting[: count + 1]
            arrays.logits_indices[:count] = self._counting[:count]

    def _stage_chunks(
        self, arrays: _Arrays[np.ndarray], decodes: int, prefill: Rows[PrefillChunk]
    ) -> tuple[int, int]:
        """Stage chunks after the decoding requests; return how many tokens and logits there are then."""
        tokens, logits, page_size = decodes, decodes, self.page_size
        for index, chunk in enumerate(prefill, decodes):
            row, end = chunk.sequence.row, chunk.start + chunk.count
            pages = self.pool_table[row, : -(-end // page_size)]
            arrays.block_table[index, : len(pages)] = pages
            positions = np.arange(chunk.start, end)
            part = slice(tokens, tokens + chunk.count)
            arrays.token_ids[part] = chunk.sequence.tokens[chunk.start : end]
            arrays.positions[part] = positions
            arrays.slot_mapping[part] = (
                pages[positions // page_size].astype(np.int64) * page_size + positions % page_size
            )
            arrays.token_rows[part] = row
            arrays.request_rows[index] = row
            arrays.seq_lens[index] = end
            arrays.decode_seq_lens[index] = end if chunk.is_replay else 0
            arrays.query_start_loc[index] = tokens
            if chunk.scored:
                count = len(chunk.scored)
                first = tokens + chunk.scored.start - chunk.start
                arrays.logits_indices[logits : logits + count] = np.arange(first, first + count)
                arrays.sample_rows[logits : logits + count] = self.no_row
                arrays.sample_positions[logits : logits + count] = 0
                logits += count
            tokens += chunk.count
            arrays.query_start_loc[index + 1] = tokens
            if chunk.completes:
                arrays.logits_indices[logits] = tokens - 1
                arrays.sample_rows[logits] = row
                arrays.sample_positions[logits] = end
                logits += 1
        return tokens, logits

    def _pad(
        self, arrays: _Arrays[np.ndarray], tokens: int, requests: int, logits: int, shape: StepShape
    ) -> None:
        """Write padding after the given numbers of tokens, requests and logits."""
        arrays.token_ids[tokens:] = 0
        arrays.positions[tokens:] = 0
        arrays.slot_mapping[tokens:] = -1
        arrays.token_rows[tokens:] = self.no_row
        arrays.seq_lens[requests:] = 0
        arrays.sample_positions[logits:] = 0
        if not shape.decode_only:
            arrays.request_rows[requests:] = self.no_row
            arrays.decode_seq_lens[requests:] = 0
            arrays.query_start_loc[requests:] = tokens
            arrays.logits_indices[logits:] = 0
            arrays.sample_rows[logits:] = self.no_row

    def _find_first_byte(self, shape: StepShape) -> int:
        return self._table_at - sum(_num_bytes(*size) for size in _sizes(shape).values())

    def _carve_staging(self, shape: StepShape, turn: int) -> _Arrays[np.ndarray]:
        return self._carve(self._staging[turn].numpy(), shape, np.dtype, self._counting)

    def _carve_device(self, shape: StepShape) -> _Arrays[Tensor]:
        dtypes = {"int64": torch.int64, "int32": torch.int32}
        return self._carve(self._device, shape, dtypes.__getitem__, self._device_counting)

    def _carve(self, memory: Any, shape: StepShape, dtype_of: Any, counting: Any) -> _Arrays[Any]:
        """Return views of `memory`, which is a torch tensor or a numpy array."""
        views, at, requests = {}, self._first_byte(shape), shape.num_requests
        for name, (dtype, count) in _sizes(shape).items():
            size = int(dtype[3:]) // 8 * count
            views[name] = memory[at : at + size].view(dtype_of(dtype))
            at += _num_bytes(dtype, count)
        table = memory[at : at + requests * self._row_bytes].view(dtype_of("int32"))
        views["block_table"] = table.reshape(requests, -1)
        if shape.decode_only:
            views["request_rows"] = views["sample_rows"] = views["token_rows"]
            views["decode_seq_lens"] = views["seq_lens"]
            views["query_start_loc"] = counting[: requests + 1]
            views["logits_indices"] = counting[:requests]
            views["tiles"] = counting[:0]
        views["tiles"] = views["tiles"].reshape(-1, 4)
        return _Arrays(**views)
