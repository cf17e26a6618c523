"""Scales of keys and values for KV formats that take scales: the largest magnitudes on a text, by layer.

Keys and values are observed where the model attends, after position encoding and normalization, since that is
what is stored. `layer_stream.py` runs the layers one at a time; results are kept in the work record.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ....base.errors import UserError
from ....base.progress import progress_bar
from ....kernels.attention.options import AttentionOptions
from ....kernels.attention.reference import softmax_by_hand
from ....layouts.kv.format import KV_FORMATS, KVScales, largest_of
from ...checkpoints.checkpoint import Checkpoint
from ...model_loader.layer_stream import LayerStream
from ...model_loader.weight_map import Assignment
from ..shards.work_record import WorkRecord

IMPLEMENTATION = "scalegate_calibration"
LEAST = 1e-6
"""A lower limit for the largest magnitude, so that a layer whose values are all 0 gets a scale above 0."""


def find_kv_scales(
    checkpoint: Checkpoint,
    kv_format: str,
    sequences: Tensor | None,
    device: torch.device,
    record: WorkRecord,
    progress: bool,
) -> dict[str, KVScales]:
    """Return one scale for all heads of each attention module, by the module's name in the checkpoint.

    The result is empty if there is no text, or `kv_format` takes no scales: keys and values are then stored
    unscaled.
    sequences: int64 [sequences, tokens]
    """
    holds = largest_of(KV_FORMATS[kv_format])
    if holds is None or sequences is None:
        return {}
    if not record.kv:
        record.kv = largest_keys_and_values(checkpoint, sequences, device, progress)
        record.write()
    return {
        module: KVScales(*(torch.tensor([max(magnitude, LEAST) / holds]) for magnitude in largest))
        for module, largest in record.kv.items()
    }


def largest_keys_and_values(
    checkpoint: Checkpoint, sequences: Tensor, device: torch.device, progress: bool
) -> dict[str, tuple[float, float]]:
    """Return the largest magnitude of the keys and of the values of each attention module.

    Raises UserError if a layer does not use transformers' AttentionInterface.
    """
    seen: dict[nn.Module, tuple[float, float]] = {}
    with torch.inference_mode():
        stream = LayerStream(checkpoint, sequences, device)
        model = stream.model
        model.set_attn_implementation(IMPLEMENTATION)
        model.config.get_text_config(decoder=True).kv_seen = seen
        for name in progress_bar(stream.layers, desc="keys and values", unit=" layers", shown=progress):
            stream.place(name)
            stream.advance(name)
            stream.drop(name)
    names = {module: name for name, module in model.named_modules() if module in seen}
    if len(names) != model.config.get_text_config(decoder=True).num_hidden_layers:
        raise UserError(
            f"{checkpoint.source}: keys were seen in only {len(names)} layers while the model ran, so scales "
            "cannot be calibrated; write a recipe with the same `kv_cache` and without `calibration`"
        )
    return {_in_checkpoint(name, stream.assignments): seen[module] for module, name in names.items()}


def _in_checkpoint(module: str, assignments: Sequence[Assignment]) -> str:
    """Return the checkpoint's name of the module that contains the weights of the model's `module`."""
    inside = next(item for item in assignments if item.target.startswith(f"{module}."))
    depth = inside.target.removeprefix(module).count(".")
    return inside.names[0].rsplit(".", depth)[0]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with query [B, H, T, D], key and value [B, H_kv, T, D] and an additive mask [B, 1, T, T] to [B,
    T, H, D_v].
    """
    seen = cast(dict[nn.Module, tuple[float, float]], cast(Any, module.config).kv_seen)
    before = seen.get(module, (0.0, 0.0))
    seen[module] = (
        max(before[0], float(key.abs().amax())),
        max(before[1], float(value.abs().amax())),
    )
    mask = attention_mask[..., : key.shape[2]]
    if softcap is None and s_aux is None:
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    else:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        output = softmax_by_hand(query, key, value, mask, AttentionOptions(scale, None, softcap, s_aux))
    return output.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
