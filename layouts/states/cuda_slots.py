"""The slots of a layer's states on a GPU, one for each running request, and a step over them.

The CPU's slots are in `cpu_slots.py`.
"""

from typing import Any

import torch
from torch import Tensor

from ...kernels.states.batch import StateBatch
from ..kv.attention_metadata import AttentionMetadata
from .state_format import StateFormat, StateInputs, StateShape


class CudaStateSlots:
    """One layer's states, [max_requests, *dims]; kernels start a request from zeros."""

    def __init__(
        self, state_format: StateFormat[Any], shape: StateShape, max_requests: int, device: torch.device
    ):
        self.state_format = state_format
        self.slots = torch.zeros((max_requests, *shape.dims), dtype=shape.dtype, device=device)

    def forward(self, inputs: StateInputs, like: Tensor, metadata: AttentionMetadata) -> Tensor:
        decode_only = metadata.prefill_tiles is None
        # Padding of other batches belongs to no request, so no kernel writes its outputs.
        output = (like.new_empty if decode_only else like.new_zeros)(like.shape)
        batch = StateBatch(metadata.query_start_loc, metadata.seq_lens, metadata.request_rows, decode_only)
        self.state_format.run_kernels(inputs, self.slots, batch, output)
        return output
