"""The attention layers of a checkpoint as they are served, known without any of its weights."""

from dataclasses import replace

import torch

from ...serving_check.engine.attention import AttentionLayer, attention_layers
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.default_dtype import default_dtype
from .skeleton import build_skeleton


def attention_layers_of(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device
) -> dict[int, AttentionLayer]:
    """By layer index, what its storage on `device` holds. UserError for a model that cannot be served."""
    model = build_skeleton(checkpoint, dtype or default_dtype(checkpoint))
    model.to(device=torch.device("meta"))  # type: ignore[call-arg]
    layers = attention_layers(model)
    return {index: replace(layer, shape=layer.shape.on(device)) for index, layer in layers.items()}
