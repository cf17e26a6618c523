"""Batch-invariant products on a CPU: any of the CPU's layouts, called with the same number of rows every
time.

oneDNN, MKL and torch's own kernels choose algorithm and blocking by the number of rows. If the number of rows
is always the same, so is their choice, and a row's bits do not depend on other rows. A GPU has
batch-invariant kernels of its own.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ...base.batch_invariance import CPU_ROWS, INVARIANCE_MODES, row_tiles
from ..formats.weight_format import Weight
from .layout import FOR_INVARIANCE_ONLY, Layout, PackedWeight, Problem, Serves, emulates_inputs, rounds_inputs

SUFFIX = "_fixed_rows"


class FixedRows:
    """Computes a dense layout's product, `CPU_ROWS` rows at a time; the last tile is padded with zeros."""

    def __init__(self, dense: Layout):
        self.dense = dense
        self.name = dense.name + SUFFIX
        self.kernel = dense.kernel
        self.rounds_inputs = rounds_inputs(dense)
        self.emulates = emulates_inputs(dense)

    def refuses(self, problem: Problem) -> str | None:
        if problem.batch_invariance == "tuned":
            return FOR_INVARIANCE_ONLY
        serves = Serves(device="cpu", invariance_modes=INVARIANCE_MODES, rounds_inputs=self.rounds_inputs)
        return serves.refuses(problem) or self.dense.refuses(replace(problem, batch_invariance="tuned"))

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        return replace(self.dense.pack(weight, dtype), layout=self.name)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        count = x.shape[0]
        if count == CPU_ROWS:
            return self.dense.matmul(x, packed)
        y = x.new_empty(count, packed.shape[0])
        for tile in row_tiles(count, CPU_ROWS):
            rows = tile.stop - tile.start
            padded = functional.pad(x[tile], (0, 0, 0, CPU_ROWS - rows))
            y[tile] = self.dense.matmul(padded, packed)[:rows]
        return y
