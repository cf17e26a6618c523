"""Which experts each token of a step uses, sorted by expert once for all products of a layer.

On a GPU, a kernel sorts them (`kernels/experts/routing.py`) into a buffer whose size depends only on the
number of tokens, as CUDA graphs require. On a CPU there is nothing to sort.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...base.batch_invariance import BatchInvariance
from ...kernels.experts.routing import ExpertRouting, buffer_size, route_into, routing_in
from ...kernels.experts.tile import block_rows_of


@dataclass(frozen=True)
class Routing:
    """The experts of each token, sorted for the kernels.

    expert:           int [T, top_k], the experts of each token, 0 .. count - 1
    count:            number of experts
    buffer:           int32, memory for the sorted assignments; empty on a CPU
    batch_invariance: the mode of the products that use the routing
    """

    expert: Tensor
    count: int
    buffer: Tensor
    batch_invariance: BatchInvariance = "tuned"

    @classmethod
    def of(cls, expert: Tensor, count: int, batch_invariance: BatchInvariance = "tuned") -> "Routing":
        buffer = torch.empty(cls.buffer_size(expert, count), dtype=torch.int32, device=expert.device)
        routing = cls(expert, count, buffer, batch_invariance)
        if expert.device.type == "cuda":
            route_into(buffer, expert, count, routing.block_rows)
        return routing

    @staticmethod
    def buffer_size(expert: Tensor, count: int) -> int:
        """Return the number of elements of the buffer; it is linear in T, so that a traced graph can express
        it.
        """
        return buffer_size(expert.shape[0] * expert.shape[1], count) if expert.device.type == "cuda" else 0

    @cached_property
    def blocks(self) -> ExpertRouting:
        """Return the sorted assignments in the form of the kernels."""
        assignments = self.expert.shape[0] * self.expert.shape[1]
        return routing_in(self.buffer, assignments, self.count, self.block_rows)

    @property
    def block_rows(self) -> int:
        """Return how many assignments of one expert the kernels multiply at once."""
        assignments = self.expert.shape[0] * self.expert.shape[1]
        return block_rows_of(assignments, self.count, self.batch_invariance != "tuned")
