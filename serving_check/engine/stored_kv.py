"""A model over keys and values as a KV format stores them, one whole text at a time: what serving computes.

For measuring what a format costs in quality. Not for serving: nothing is batched, pages serve one text each.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...kernels.prefill_attention import tiles_of
from ...layouts.kv_format import (
    KV_FORMATS,
    DeviceDecodeTokens,
    KVScales,
    PackedTokens,
    PoolSize,
    PrefillTokens,
    PromptPiece,
)
from .attention import PagedAttention, attention_layers
from .kv_pool import pages_for


class OverStoredKV(nn.Module):
    """Stands for `model`, which from here on belongs to it, for texts of at most `max_tokens`."""

    def __init__(
        self, model: PreTrainedModel, kv_format: str, scales: Mapping[int, KVScales], max_tokens: int
    ):
        super().__init__()
        self.model = model
        self.layers = attention_layers(model)
        stored = KV_FORMATS[kv_format]
        self.page_size = stored.page_size(model.device)
        self.size = PoolSize(pages_for(max_tokens, self.page_size) + 1, self.page_size, 1)
        self.storage = {
            index: stored.allocate(layer.shape, self.size, model.device, scales.get(index))
            for index, layer in self.layers.items()
        }

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        """input_ids: int64 [1, T]; `options` go to the model."""
        device, count = input_ids.device, input_ids.shape[1]
        step = packed_prompt if device.type == "cuda" else prompt
        return self.model(
            input_ids=input_ids,
            position_ids=torch.arange(count, device=device)[None],
            paged=PagedAttention(self.layers, self.storage, step(count, self.page_size, device)),
            **options,
        )


def prompt(count: int, page_size: int, device: torch.device) -> PrefillTokens:
    """One text of `count` tokens, on pages from 1 on."""
    pages = np.arange(1, pages_for(count, page_size) + 1)
    slots = torch.arange(count, device=device) + page_size
    return PrefillTokens(slots, [PromptPiece(0, count, pages, 0)], page_size)


def packed_prompt(count: int, page_size: int, device: torch.device) -> PackedTokens:
    """The same as a GPU takes it."""
    width = pages_for(count, page_size)
    slots = torch.arange(count, device=device) + page_size
    block_table = torch.arange(1, width + 1, dtype=torch.int32, device=device)[None]
    nobody = torch.zeros(1, dtype=torch.int32, device=device)
    decode = DeviceDecodeTokens(slots[:1], block_table, nobody, nobody.long(), width * page_size, {})
    tiles = torch.from_numpy(tiles_of(0, [(count, 0, 0)], 0))
    return PackedTokens(slots, decode, tiles.to(device))
