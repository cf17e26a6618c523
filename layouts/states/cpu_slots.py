"""The slots of a layer's states on the CPU, one for each running request, and a step over them.

Slots on a GPU are in `cuda_slots.py`.
"""

from typing import Any

import torch
from torch import Tensor

from ..kv.attention_metadata import AttentionMetadata
from ..kv.cpu import on_host
from ..kv.layer import zeros
from .state_format import StateFormat, StateInputs, StateShape


class CpuStateSlots:
    """One layer's states, [max_requests, *dims]."""

    def __init__(
        self, state_format: StateFormat[Any], shape: StateShape, max_requests: int, device: torch.device
    ):
        self.state_format = state_format
        self.slots = zeros((max_requests, *shape.dims), shape.dtype, device)

    def forward(self, inputs: StateInputs, like: Tensor, metadata: AttentionMetadata) -> Tensor:
        """With batch invariance, compute each token separately, so that no sum's order depends on the batch
        or on how a prompt was cut.
        """
        host = on_host(metadata)
        decodes = host.num_decodes if metadata.batch_invariance == "tuned" else 0
        outputs = []
        if decodes:
            rows = torch.from_numpy(host.request_rows[:decodes])
            states = self.slots[rows]
            outputs.append(self.state_format.step(inputs.part(slice(0, decodes)), states))
            self.slots[rows] = states
        for request in host.requests(decodes):
            state = self.slots[request.row]
            if request.start == 0:
                state.zero_()
            end = request.first_token + request.count
            if metadata.batch_invariance == "tuned":
                outputs.append(self.state_format.scan(inputs.part(slice(request.first_token, end)), state))
            else:
                outputs += [
                    self.state_format.step(inputs.part(slice(at, at + 1)), state[None])
                    for at in range(request.first_token, end)
                ]
        padding = len(like) - host.num_tokens
        if padding:
            shape = outputs[0].shape[1:] if outputs else like.shape[1:]
            outputs.append(like.new_zeros(padding, *shape))
        return torch.cat(outputs)
