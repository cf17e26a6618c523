"""Decode steps on a GPU as CUDA graphs: one for each batch bucket, captured before the first request.

Not for prefill, and not for choosing who decodes. A step costs one small copy to the device and one launch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ...layouts.kv_cuda import DeviceDecodeTokens
from .attention import AttentionLayer, PagedAttention
from .kv_pool import KVPool
from .sequence import Sequence


class DecodeGraphs:
    """The captured decode step of one model, and the static buffers that all its graphs share.

    Buffers, for the largest bucket B: tokens and positions int64 [B, 1], slots int64 [B], lengths int32 [B],
    block_table int32 [B, W], logits [B, V].
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[int, AttentionLayer],
        pool: KVPool,
        buckets: tuple[int, ...],
        max_model_len: int,
    ):
        self.model = model
        self.layers = layers
        self.pool = pool
        self.buckets = buckets
        largest, device = buckets[-1], model.device
        width = pool.block_table.shape[1]
        # One row of scalars a request, so that a step's update is one copy: token, position, slot, length.
        self.rows = torch.zeros(largest, 4, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(largest, width, dtype=torch.int32, device=device)
        self.staged_rows = torch.zeros(largest, 4, dtype=torch.int64, pin_memory=True)
        self.staged_table = torch.zeros(largest, width, dtype=torch.int32, pin_memory=True)
        self.slots = torch.zeros(largest, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(largest, dtype=torch.int32, device=device)
        self.tokens = DeviceDecodeTokens(self.slots, self.block_table, self.lengths, max_model_len)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.logits: dict[int, Tensor] = {}

    def capture(self, progress: bool | None = None) -> None:
        """Capture every bucket, the largest first, in one memory pool, on padding rows: nothing is stored."""
        self.rows.zero_()
        self.rows[:, 2] = -1
        memory = None
        disable = None if progress is None else not progress
        with tqdm(
            reversed(self.buckets), "capturing decode graphs", len(self.buckets), disable=disable
        ) as bar:
            for size in bar:
                with _side_stream():
                    self._forward(size)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory):
                    self.logits[size] = self._forward(size)
                memory = graph.pool()
                self.graphs[size] = graph

    def decode(self, sequences: list[Sequence]) -> Tensor:
        """One token for each sequence, its last one → logits [B, V] for the next, good until the next step."""
        count = len(sequences)
        size = next(bucket for bucket in self.buckets if bucket >= count)
        self._stage(sequences, size)
        self.graphs[size].replay()
        return self.logits[size][:count]

    def _stage(self, sequences: list[Sequence], size: int) -> None:
        """Fill the buffers: the scalars always, the block table too (its rows move as requests come and go)."""
        count, page_size = len(sequences), self.pool.page_size
        # The copies of the step before have been waited for by whoever read its tokens.
        rows, table = self.staged_rows.numpy(), self.staged_table.numpy()
        lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
        positions = lengths - 1
        indices = np.array([sequence.row for sequence in sequences], np.int64)
        width = self.pool.pages_for(int(lengths.max()))
        table[:count, :width] = self.pool.block_table[indices, :width]
        rows[:count, 0] = [sequence.tokens[-1] for sequence in sequences]
        rows[:count, 1] = positions
        pages = table[np.arange(count), positions // page_size].astype(np.int64)
        rows[:count, 2] = pages * page_size + positions % page_size
        rows[:count, 3] = lengths
        rows[count:size] = (0, 0, -1, 0)
        self.rows[:size].copy_(self.staged_rows[:size], non_blocking=True)
        self.block_table[:count, :width].copy_(self.staged_table[:count, :width], non_blocking=True)

    def _forward(self, size: int) -> Tensor:
        rows = self.rows[:size]
        self.slots[:size].copy_(rows[:, 2])
        self.lengths[:size].copy_(rows[:, 3])
        return self.model(
            input_ids=rows[:, 0:1].contiguous(),
            position_ids=rows[:, 1:2].contiguous(),
            use_cache=False,
            logits_to_keep=0,
            paged=PagedAttention(self.layers, self.pool.layers, self.tokens.rows(size)),
        ).logits[:, 0]


@contextmanager
def _side_stream() -> Iterator[None]:
    """A warm-up run before capture belongs on another stream than the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
