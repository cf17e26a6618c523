"""Steps that compute prompts on a GPU: decoding requests first, then prefill chunks, in one pass.

Each weight is read once for all of them: requests decode almost for nothing while a prompt is computed.
Small steps are padded to a bucket and replayed as CUDA graphs, as the host could not launch their kernels as
fast as they run; large ones are launched kernel by kernel.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.prefill_attention import TILE, tiles_of
from ...layouts.kv_format import DeviceDecodeTokens, PackedTokens, PieceContexts
from .decode_graphs import Decoded, DecodeGraphs
from .jit_monitor import JitEvent, report
from .scheduler import PrefillChunk
from .sequence import Sequence
from .step_clock import StepClock

TOKEN, POSITION, SLOT, ROW = range(4)
"""Columns of `tokens`."""
LENGTH, OWNER, KEPT, DRAWN = range(4)
"""Columns of `requests`: of each request its length where it decodes, else 0, and its row in the pool; of
each token to be drawn, the packed token that it follows and the row in the pool that it is for."""
LARGEST_GRAPH = 1024
"""Tokens; from here on the kernels take longer than their launches."""


@dataclass(frozen=True)
class _Buffers:
    """One step's inputs, on the device or on their way to it; for T tokens and R requests at most."""

    tokens: Tensor
    """int64 [T, 4]."""
    requests: Tensor
    """int64 [R, 4]."""
    tiles: Tensor
    """int32 [N, 4], as `kernels/prefill_attention.py` takes them."""
    block_table: Tensor
    """int32 [R, W]: a row for each decoding request, then one for each chunk."""


class MixedBatches:
    """The mixed batches of one model, and the graphs of the small ones."""

    def __init__(self, graphs: DecodeGraphs, largest_chunk: int, clock: StepClock):
        self.graphs = graphs
        self.pool = graphs.pool
        self.clock = clock
        self.num_requests = len(self.pool.block_table)
        self.largest = largest_chunk + self.num_requests
        self.buckets = mixed_buckets(self.largest)
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        self._no_row = self.pool.no_row
        device = graphs.last_tokens.device
        self._device = self._buffers(graphs.block_table, device=device)
        # Two: a step is staged while the copies of the one before may still be waiting to run.
        self._staging = [
            (
                self._buffers(
                    torch.zeros(self.pool.block_table.shape, dtype=torch.int32, pin_memory=True),
                    pin_memory=True,
                ),
                torch.cuda.Event(),
            )
            for _ in range(2)
        ]

    def _buffers(self, block_table: Tensor, **where: Any) -> _Buffers:
        return _Buffers(
            torch.zeros(self.largest, 4, dtype=torch.int64, **where),
            torch.zeros(self.num_requests, 4, dtype=torch.int64, **where),
            torch.zeros(self._num_tiles(self.largest), 4, dtype=torch.int32, **where),
            block_table,
        )

    def launch(self, decode: list[Sequence], chunks: list[PrefillChunk]) -> Decoded:
        """A token for each decoding request, and the chunks; logits for the former, then for each prompt that
        a chunk completes."""
        count = len(decode) + sum(chunk.count for chunk in chunks)
        size = next((bucket for bucket in self.buckets if bucket >= count), count)
        if size in self.buckets and size not in self.captured:
            self._capture(size)
        self._stage(decode, chunks, size)
        if size in self.captured:
            graph, (logits, drawn) = self.captured[size]
            graph.replay()
        else:
            logits, drawn = self._run(size, self._contexts(len(decode), chunks))
        wanted = len(decode) + sum(chunk.completes for chunk in chunks)
        return Decoded(logits[:wanted], drawn[:wanted])

    def warm_up_sizes(self) -> list[int]:
        return mixed_warm_up_buckets(self.largest)

    def warm_up(self, size: int) -> None:
        """Meet a size, on tokens that are all padding."""
        if size in self.buckets:
            self._capture(size)
        else:
            self._stage([], [], size)
            self._run(size, PieceContexts(0, [np.zeros(1, np.int64)]))

    def _contexts(self, first_row: int, chunks: list[PrefillChunk]) -> PieceContexts:
        return PieceContexts(
            first_row,
            [
                self.pool.block_table[chunk.sequence.row, : self.pool.pages_for(chunk.start + chunk.count)]
                for chunk in chunks
            ],
        )

    def _capture(self, size: int) -> None:
        report(JitEvent("graph capture", f"mixed batch of {size}"))
        self._stage([], [], size)
        self.captured[size] = self.graphs.memory.capture(lambda: self._run(size))

    def _stage(self, decode: list[Sequence], chunks: list[PrefillChunk], size: int) -> None:
        """Fill the buffers, by way of host memory that no copy is still reading."""
        self._staging.reverse()
        staged, copied = self._staging[0]
        copied.synchronize()
        tokens, requests, table = staged.tokens.numpy(), staged.requests.numpy(), staged.block_table.numpy()
        requests[:] = (0, self._no_row, 0, self._no_row)
        count = len(decode)
        if decode:
            lengths = np.array([sequence.length for sequence in decode])
            rows = np.array([sequence.row for sequence in decode])
            width = self.pool.pages_for(int(lengths.max()))
            table[:count, :width] = self.pool.block_table[rows, :width]
            tokens[:count, TOKEN] = [sequence.tokens[-1] for sequence in decode]
            tokens[:count, POSITION] = lengths - 1
            tokens[:count, SLOT] = self._slots(
                table[np.arange(count), (lengths - 1) // self.pool.page_size], lengths - 1
            )
            tokens[:count, ROW] = rows
            requests[:count, LENGTH] = lengths
            requests[:count, KEPT] = np.arange(count)
            requests[:count, DRAWN] = requests[:count, OWNER] = rows
        at, drawn = count, count
        for index, chunk in enumerate(chunks, count):
            row, end = chunk.sequence.row, chunk.start + chunk.count
            pages = self.pool.block_table[row, : self.pool.pages_for(end)]
            table[index, : len(pages)] = pages
            positions = np.arange(chunk.start, end)
            packed = tokens[at : at + chunk.count]
            packed[:, TOKEN] = chunk.sequence.tokens[chunk.start : end]
            packed[:, POSITION] = positions
            packed[:, SLOT] = self._slots(pages[positions // self.pool.page_size], positions)
            packed[:, ROW] = row
            at += chunk.count
            requests[index, OWNER] = row
            if chunk.completes:
                requests[drawn, KEPT:] = at - 1, row
                drawn += 1
        tokens[at:size] = (0, 0, -1, self._no_row)
        tiles = tiles_of(
            count, [(chunk.count, chunk.start, index) for index, chunk in enumerate(chunks, count)], size - at
        )
        staged.tiles[: len(tiles)] = torch.from_numpy(tiles)
        staged.tiles[len(tiles) : self._num_tiles(size)] = 0
        self.clock.device_starts()
        self.graphs.sampling.take([*decode, *(chunk.sequence for chunk in chunks if chunk.completes)])
        self._copy(staged, size, count + len(chunks))
        copied.record()

    def _copy(self, staged: _Buffers, size: int, rows: int) -> None:
        device, tiles = self._device, self._num_tiles(size)
        device.tokens[:size].copy_(staged.tokens[:size], non_blocking=True)
        device.requests.copy_(staged.requests, non_blocking=True)
        device.tiles[:tiles].copy_(staged.tiles[:tiles], non_blocking=True)
        device.block_table[:rows].copy_(staged.block_table[:rows], non_blocking=True)

    def _run(self, size: int, contexts: PieceContexts | None = None) -> tuple[Tensor, Tensor]:
        """Logits [R, V] and the drawn tokens [R] of what is in the buffers; contexts as in PackedTokens."""
        device, last_tokens = self._device, self.graphs.last_tokens
        tokens, requests = device.tokens[:size], device.requests[:size]
        known, kept, rows = tokens[:, TOKEN], requests[:, KEPT].contiguous(), requests[:, DRAWN]
        step = PackedTokens(
            tokens[:, SLOT].contiguous(),
            DeviceDecodeTokens(
                tokens[: len(requests), SLOT],
                device.block_table[: len(requests)],
                requests[:, LENGTH].int(),
                requests[:, OWNER],
                self.graphs.max_context,
                self.graphs.workspaces,
            ),
            device.tiles[: self._num_tiles(size)],
            contexts,
        )
        logits = self.graphs.forward(
            torch.where(known >= 0, known, last_tokens[tokens[:, ROW]]),
            tokens[:, POSITION].contiguous(),
            step,
            kept,
        )
        drawn = self.graphs.sampling.draw(logits, rows, tokens[:, POSITION][kept] + 1)
        last_tokens[rows] = drawn
        return logits, drawn

    def _slots(self, pages: np.ndarray, positions: np.ndarray) -> np.ndarray:
        page_size = self.pool.page_size
        return pages.astype(np.int64) * page_size + positions % page_size

    def _num_tiles(self, size: int) -> int:
        """The most that `size` tokens can take: each chunk, and the padding, may end in a tile not full."""
        return size // TILE + min(size, self.num_requests) + 1


def mixed_buckets(largest: int) -> tuple[int, ...]:
    """Every 64 tokens up to 640, then every 128, so that little is computed for nothing."""
    sizes = [*range(64, 641, 64), *range(768, LARGEST_GRAPH + 1, 128)]
    return (*(size for size in sizes if size < largest), *((largest,) if largest <= LARGEST_GRAPH else ()))


def mixed_warm_up_buckets(largest: int) -> list[int]:
    """Every bucket, and of the larger sizes enough to meet all that kernels choose by them."""
    larger = [LARGEST_GRAPH * halves // 2 << power for power in range(8) for halves in (3, 4)]
    sizes = [*mixed_buckets(largest), *(size for size in larger if size < largest), largest]
    return list(dict.fromkeys(sizes))
