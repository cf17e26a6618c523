"""Running the model on one step's tokens: decode is always [B, 1], prefill a packed [1, T].

Not for choosing the tokens of the step, nor for drawing the next ones.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...layouts.kv_format import DecodeTokens, PrefillTokens, PromptPiece, StepTokens
from .attention import AttentionLayer, PagedAttention
from .decode_graphs import Decoded, DecodeGraphs
from .device_copies import to_device
from .forward import Forward
from .kv_pool import KVPool
from .mixed_batches import MixedBatches
from .scheduler import PrefillChunk
from .sequence import Sequence
from .step_clock import StepClock


class ModelRunner:
    """The model, its attention layers and the pool they write to."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[int, AttentionLayer],
        pool: KVPool,
        buckets: tuple[int, ...] | None,
        largest_chunk: int,
        compiled: bool = False,
    ):
        self.model = model
        self.layers = layers
        self.pool = pool
        self.device = model.device
        self.buckets = buckets
        """Batch sizes that a decode step may have, ascending; None for all."""
        self.clock = StepClock(self.device)
        self.graphs: DecodeGraphs | None = None
        self.packed: MixedBatches | None = None
        """Where decoding requests and prompts are computed in one pass."""
        if self.device.type == "cuda" and buckets is not None:
            self.forward = Forward(model, layers, pool.layers)
            self.graphs = DecodeGraphs(self.forward, pool, buckets, self.clock)
            self.packed = MixedBatches(self.graphs, largest_chunk, self.clock)
            self._must_compile = compiled

    def decode(self, sequences: list[Sequence]) -> Decoded:
        """One token for each sequence, its last one → logits [B, V] for the next."""
        if self.graphs is not None:
            self.compile()
            return self.graphs.decode(sequences)
        count = len(sequences)
        size = self.bucket(count)
        # Rows past `count` only fill the bucket: token 0 at position 0, stored in the page that is nobody's.
        tokens, lengths = np.zeros(size, np.int64), np.ones(size, np.int64)
        tokens[:count] = [sequence.tokens[-1] for sequence in sequences]
        lengths[:count] = [len(sequence.tokens) for sequence in sequences]
        block_table = np.zeros((size, self.pool.pages_for(int(lengths.max()))), np.int64)
        rows = np.full(size, self.pool.no_row, np.int64)
        rows[:count] = np.array([sequence.row for sequence in sequences], np.int64)
        block_table[:count] = self.pool.block_table[rows[:count], : block_table.shape[1]]
        positions = lengths - 1
        page_size = self.pool.page_size
        slots = block_table[np.arange(size), positions // page_size] * page_size + positions % page_size
        step = DecodeTokens(self._on_device(slots), block_table, lengths, rows, page_size)
        return Decoded(self._forward(tokens[:, None], positions[:, None], step, None)[:count, 0], None)

    def prefill(self, chunks: list[PrefillChunk]) -> Tensor:
        """The chunks' tokens → logits [those that complete, V] for the next token of each that does."""
        page_size = self.pool.page_size
        tokens, positions, slots, prompt_pieces = [], [], [], []
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            where = np.arange(chunk.start, end)
            pages = self.pool.block_table[sequence.row, : self.pool.pages_for(end)].copy()
            tokens.append(np.array(sequence.tokens[chunk.start : end], np.int64))
            positions.append(where)
            slots.append(pages[where // page_size] * page_size + where % page_size)
            prompt_pieces.append(PromptPiece(chunk.start, chunk.count, pages, cast(int, sequence.row)))
        ends = np.cumsum([chunk.count for chunk in chunks])
        keep = ends[[chunk.completes for chunk in chunks]] - 1
        step = PrefillTokens(self._on_device(np.concatenate(slots)), prompt_pieces, page_size)
        # A chunk in which no prompt ends still computes one row of logits: no matrix product has zero rows.
        wanted = self._on_device(keep if len(keep) else ends[-1:] - 1)
        packed_tokens, packed_positions = np.concatenate(tokens), np.concatenate(positions)
        return self._forward(packed_tokens[None], packed_positions[None], step, wanted)[0, : len(keep)]

    def bucket(self, count: int) -> int:
        """The smallest bucket that `count` rows fit in."""
        if self.buckets is None:
            return count
        return next(size for size in self.buckets if size >= count)

    def warm_up_sizes(self) -> list[int]:
        """Every bucket; where every size is one, the powers of two: nothing is captured then."""
        if self.buckets is not None:
            return list(self.buckets)
        return [1 << power for power in range(len(self.pool.block_table).bit_length())]

    def compile(self) -> None:
        """Once, before anything is captured."""
        if self.graphs is not None and self._must_compile:
            self._must_compile = False
            self.forward.compile()

    def _forward(
        self, tokens: np.ndarray, positions: np.ndarray, step: StepTokens, keep: Tensor | None
    ) -> Tensor:
        return self.model(
            input_ids=self._on_device(tokens),
            position_ids=self._on_device(positions),
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            paged=PagedAttention(self.layers, self.pool.layers, step),
        ).logits

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(array), self.device)


def decode_buckets(max_num_seqs: int, device: torch.device) -> tuple[int, ...] | None:
    """On CUDA 1, 2, 4, 8 and then every eighth; on the CPU, where padding is only work, every size."""
    if device.type == "cpu":
        return None
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
