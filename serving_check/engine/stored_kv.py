"""A model over keys and values as a KV format stores them, one whole text at a time: what serving computes.

For measuring what a format costs in quality. Not for serving: nothing is batched, pages serve one text each.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...layouts.kv_format import KV_FORMATS
from ...layouts.kv_layer import KVScales
from .attention import PagedAttention, attention_layers
from .kv_pool import KVPool, pages_for
from .request import SamplingParams
from .scheduler import PrefillChunk
from .sequence import Sequence
from .step_input import StepBuffers


class OverStoredKV(nn.Module):
    """Stands for `model`, which from here on belongs to it, for texts of at most `max_tokens`."""

    def __init__(
        self, model: PreTrainedModel, kv_format: str, scales: Mapping[int, KVScales], max_tokens: int
    ):
        super().__init__()
        self.model = model
        self.layers = attention_layers(model)
        stored, device = KV_FORMATS[kv_format], model.device
        page_size = stored.page_size(device)
        self.pool = KVPool(
            self.layers,
            stored,
            scales,
            pages_for(max_tokens, page_size),
            page_size,
            1,
            max_tokens,
            device,
        )
        self.step_buffers = StepBuffers(
            self.pool.block_table, page_size, max_tokens, device, static=device.type == "cuda"
        )

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        """input_ids: int64 [1, T]; `options` go to the model."""
        tokens = input_ids[0].tolist()
        text = Sequence("text", tokens, len(tokens), SamplingParams(), 0, len(tokens) + 1)
        self.pool.admit(text)
        try:
            shape = self.step_buffers.shape(len(tokens), 1, 1)
            host = self.step_buffers.stage([], [PrefillChunk(text, 0, len(tokens))], shape)
            self.step_buffers.send(shape, 1)
            metadata = self.step_buffers.input(shape, host).attention
            return self.model(
                input_ids=input_ids,
                position_ids=metadata.positions[None],
                paged=PagedAttention(self.layers, self.pool.layers, metadata),
                **options,
            )
        finally:
            self.pool.release(text)
