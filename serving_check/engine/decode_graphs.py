"""Decode steps on a GPU as CUDA graphs: one for each batch bucket, captured when warm-up meets it.

Not for prefill, and not for choosing who decodes. A step costs one small copy to the device and one launch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...kernels.decode_attention import DecodeWorkspace
from ...layouts.kv_format import DeviceDecodeTokens
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
        self.workspaces: dict[tuple[int, int], DecodeWorkspace] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.logits: dict[int, Tensor] = {}
        self._memory: Any = None

    def decode(self, sequences: list[Sequence]) -> Tensor:
        """One token for each sequence, its last → logits [B, V] for the next, good until the next step."""
        count = len(sequences)
        size = next(bucket for bucket in self.buckets if bucket >= count)
        if size not in self.graphs:
            self._capture(size)
        self._stage(sequences, size)
        self.graphs[size].replay()
        return self.logits[size][:count]

    def _capture(self, size: int) -> None:
        """Capture one bucket, on rows that are all padding, so that nothing is stored."""
        self.rows.zero_()
        self.rows[:, 2] = -1
        with _side_stream():
            self._forward(size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            self.logits[size] = self._forward(size)
        self._memory = graph.pool()
        self.graphs[size] = graph

    def _stage(self, sequences: list[Sequence], size: int) -> None:
        """Fill the buffers: the scalars, and the block table, whose rows move as requests come and go."""
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
        step = DeviceDecodeTokens(
            self.slots[:size],
            self.block_table[:size],
            self.lengths[:size],
            self.block_table.shape[1] * self.pool.page_size,
            self.workspaces,
        )
        return self.model(
            input_ids=rows[:, 0:1].contiguous(),
            position_ids=rows[:, 1:2].contiguous(),
            use_cache=False,
            logits_to_keep=0,
            paged=PagedAttention(self.layers, self.pool.layers, step),
        ).logits[:, 0]


@contextmanager
def _side_stream() -> Iterator[None]:
    """A warm-up run before capture belongs on another stream than the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
