"""Sampling parameters on a GPU, by the requests' rows in the pool, where CUDA graphs read them.

A CPU draws with torch (`sampler.py`).
"""

import math
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from ....kernels.sampling.sample_tokens import sample_tokens
from ..device_copies import to_device
from ..sequence import Sequence


class SamplingRows:
    """Parameters of R rows and a row for padding, for the sampling kernel.

    numbers fp32 [R + 1, 3], integers int64 [R + 1, 2]. Unused rows are zeros, which means greedy.
    """

    def __init__(self, rows: int, device: torch.device):
        self.numbers = torch.zeros(rows + 1, 3, dtype=torch.float32, device=device)
        self.integers = torch.zeros(rows + 1, 2, dtype=torch.int64, device=device)
        self._owners: list[Sequence | None] = [None] * rows

    def take(self, sequences: Rows[Sequence]) -> None:
        """Copy the parameters of sequences that are new in their rows."""
        new = [(row, s) for s in sequences if (row := s.row) is not None and self._owners[row] is not s]
        if not new:
            return
        device, numbers, integers = self.numbers.device, [], []
        for _, sequence in new:
            asked = sequence.params
            log_min_p = math.log(asked.min_p) if asked.min_p > 0 else -math.inf
            numbers.append((asked.temperature, asked.top_p, log_min_p))
            integers.append((sequence.seed, asked.top_k))
        rows = to_device(torch.tensor([row for row, _ in new]), device)
        self.numbers[rows] = to_device(torch.tensor(numbers, dtype=torch.float32), device)
        self.integers[rows] = to_device(torch.tensor(integers, dtype=torch.int64), device)
        for row, sequence in new:
            self._owners[row] = sequence

    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Draw tokens int64 [B] from logits [B, V], for rows and positions of the tokens to be drawn, int64
        [B].
        """
        return sample_tokens(logits, rows, positions, self.numbers, self.integers)
