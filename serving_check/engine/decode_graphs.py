"""Decode steps on a GPU as CUDA graphs: one for each batch bucket, captured when warm-up meets it.

Not for prefill, and not for choosing who decodes. A step costs one small copy to the device and one launch;
tokens are drawn inside, and the next step can take them from there before the host has seen them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.decode_attention import DecodeWorkspace
from ...layouts.kv_format import DeviceDecodeTokens
from .cuda_graphs import GraphMemory
from .forward import Forward
from .jit_monitor import JitEvent, report
from .kv_pool import KVPool
from .sampling_rows import SamplingRows
from .sequence import Sequence
from .step_clock import StepClock

TOKEN, POSITION, SLOT, LENGTH, ROW, INT32_LENGTH = range(6)
"""Rows of a step's scalars; the last has the lengths once more, as numbers of 32 bits in its first half."""


@dataclass(frozen=True)
class Decoded:
    """What one bucket's graph leaves behind; good until a graph is launched again."""

    logits: Tensor
    """[B, V]."""
    drawn: Tensor | None
    """int64 [B]; None where that is left to the host."""


class DecodeGraphs:
    """The captured decode step of one model, and the static buffers that all its graphs share.

    For B, the largest bucket: scalars int64 [6, B], B rounded up to even, and block_table int32 [B, W].
    last_tokens int64 [rows of the pool + 1]: the token drawn last for each row; padding has the last.
    """

    def __init__(self, forward: Forward, pool: KVPool, buckets: tuple[int, ...], clock: StepClock):
        self.forward = forward
        self.pool = pool
        self.buckets = buckets
        self.clock = clock
        largest, device = buckets[-1], forward.model.device
        rows, width = pool.block_table.shape
        # Together, so that a step's update is one copy; each row is what a kernel reads, on 16 bytes.
        columns = largest + largest % 2
        self.scalars = torch.zeros(6, columns, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(largest, width, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.sampling = SamplingRows(rows, device)
        # Two of each: a step is staged while the copies of the one before may still be waiting to run.
        self.staging = [
            (
                torch.zeros(6, columns, dtype=torch.int64, pin_memory=True),
                torch.zeros(largest, width, dtype=torch.int32, pin_memory=True),
            )
            for _ in range(2)
        ]
        self.workspaces: dict[tuple[int, int], DecodeWorkspace] = {}
        self.max_context = width * pool.page_size
        """The longest context that the block table can name, in tokens."""
        self.memory = GraphMemory()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.decoded: dict[int, tuple[Tensor, Tensor]] = {}
        """The logits and drawn tokens of each."""

    def decode(self, sequences: list[Sequence]) -> Decoded:
        """Launch one token for each sequence: its last, or where the host has not seen it, the drawn."""
        count = len(sequences)
        size = next(bucket for bucket in self.buckets if bucket >= count)
        if size not in self.graphs:
            self._capture(size)
        self._stage(sequences, size)
        self.graphs[size].replay()
        logits, drawn = self.decoded[size]
        return Decoded(logits[:count], drawn[:count])

    def _capture(self, size: int) -> None:
        """Capture one bucket, on rows that are all padding, so that nothing is stored."""
        report(JitEvent("graph capture", f"decode step of {size}"))
        self._pad()
        self.graphs[size], self.decoded[size] = self.memory.capture(lambda: self._decode(size))

    def _pad(self) -> None:
        """Fill the buffers with nothing but padding."""
        self.scalars[:] = torch.tensor(self._padding(), device=self.scalars.device)[:, None]

    def _padding(self) -> list[int]:
        """The scalars of a request that is none."""
        return [0, 0, -1, 0, len(self.last_tokens) - 1, 0]

    def _stage(self, sequences: list[Sequence], size: int) -> None:
        """Fill the buffers: the scalars, and the block table, whose rows move as requests come and go."""
        self.staging.reverse()
        staged_scalars, staged_table = self.staging[0]
        scalars, table = staged_scalars.numpy(), staged_table.numpy()
        count, page_size = len(sequences), self.pool.page_size
        lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
        positions = lengths - 1
        indices = np.array([sequence.row for sequence in sequences], np.int64)
        width = self.pool.pages_for(int(lengths.max()))
        table[:count, :width] = self.pool.block_table[indices, :width]
        scalars[:, count:size] = np.array(self._padding())[:, None]
        scalars[TOKEN, :count] = [sequence.tokens[-1] for sequence in sequences]
        scalars[POSITION, :count] = positions
        pages = table[np.arange(count), positions // page_size].astype(np.int64)
        scalars[SLOT, :count] = pages * page_size + positions % page_size
        scalars[LENGTH, :count] = lengths
        scalars[ROW, :count] = indices
        scalars[INT32_LENGTH].view(np.int32)[:size] = scalars[LENGTH, :size]
        self.clock.device_starts()
        self.sampling.take(sequences)
        # Whole rows, stale past `size` and `width`: only a contiguous copy runs without making the host wait.
        self.scalars.copy_(staged_scalars, non_blocking=True)
        self.block_table[:count].copy_(staged_table[:count], non_blocking=True)

    def _decode(self, size: int) -> tuple[Tensor, Tensor]:
        rows, known = self.scalars[ROW, :size], self.scalars[TOKEN, :size]
        tokens = torch.where(known >= 0, known, self.last_tokens[rows])
        logits = self.forward(tokens, self.scalars[POSITION, :size], self._step(size), None)
        drawn = self.sampling.draw(logits, rows, self.scalars[LENGTH, :size])
        self.last_tokens[rows] = drawn
        return logits, drawn

    def _step(self, size: int) -> DeviceDecodeTokens:
        return DeviceDecodeTokens(
            self.scalars[SLOT, :size],
            self.block_table[:size],
            self.scalars[INT32_LENGTH].view(torch.int32)[:size],
            self.scalars[ROW, :size],
            self.max_context,
            self.workspaces,
        )
