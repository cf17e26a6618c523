"""The attention layers and states of a checkpoint as they are served, known without any of its weights."""

from dataclasses import replace

import torch
from torch import nn

from ...base.errors import UserError
from ...base.log import logger
from ...layouts.modules.experts import is_experts
from ...serving_check.engine.attention import (
    AttentionLayer,
    ServedLayers,
    context_length,
    refuse_on_gpu,
    served_layers,
)
from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.engine.prepare_model import refuse_rounded_positions
from ...serving_check.engine.state_layers import keeps_a_state
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.default_dtype import default_dtype
from .merge_groups import no_experts
from .skeleton import build_skeleton, meta_model


def attention_layers_of(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device
) -> dict[int, AttentionLayer]:
    """Return the attention layers, by index, as they are stored on `device`. Raise UserError for a model that
    cannot be served."""
    return served_layers_of(checkpoint, dtype, device).attention


def served_layers_of(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device) -> ServedLayers:
    """Return the attention and the states that the checkpoint's layers keep for requests on `device`.

    Raise UserError for a model that cannot be served.
    """
    model = build_skeleton(checkpoint, dtype or default_dtype(checkpoint))
    model.to(device=torch.device("meta"))  # type: ignore[call-arg]
    _skip_experts(model)
    found = served_layers(model)
    layers = found.attention.items()
    return replace(
        found, attention={index: replace(layer, shape=layer.shape.on(device)) for index, layer in layers}
    )


def has_states(checkpoint: Checkpoint) -> bool:
    """Say whether some of the checkpoint's layers are recurrent."""
    model = meta_model(checkpoint, default_dtype(checkpoint))
    return any(keeps_a_state(module) for module in model.modules())


def layers_with_states_of(checkpoint: Checkpoint) -> ServedLayers | None:
    """Return what the checkpoint's layers keep for requests if some layers are recurrent; None if none are.

    Raise UserError if the layers' shapes are not known.
    """
    if not has_states(checkpoint):
        return None
    try:
        return served_layers_of(checkpoint, None, torch.device("cpu"))
    except UserError:
        raise
    except Exception as error:
        # What cannot be run on the meta device may run on another.
        raise UserError(f"{type(error).__name__}: {error}") from error


def state_bytes_of(checkpoint: Checkpoint) -> int | None:
    """Return the bytes that recurrent layers keep of each request: 0 without such layers, None if not
    known.
    """
    try:
        layers = layers_with_states_of(checkpoint)
    except UserError as error:
        logger.debug(f"the state of {checkpoint.source} is not known: {error}")
        return None
    return 0 if layers is None else layers.state_bytes


def refuse_unserved(
    checkpoint: Checkpoint,
    length: int,
    device: torch.device,
    kv_format: str = UNQUANTIZED,
    shorter_by: str = "",
    unquantized_by: str = "",
) -> None:
    """Raise UserError if the embedded engine cannot serve the checkpoint; none of its weights is read.

    length: tokens of a request, prompt and answer
    device: the device on which it would be served
    kv_format: how keys and values would be stored
    shorter_by: the options by which a user shortens requests, if not by the one for max_model_len
    unquantized_by: how a user asks for unquantized keys and values, if not by an option
    """
    model = meta_model(checkpoint, default_dtype(checkpoint)).eval()
    architecture = type(model).__name__
    context_length(model, length, shorter_by)
    try:
        with torch.device("meta"):
            _skip_experts(model)
            layers = served_layers(model)
    except UserError:
        raise
    except Exception as error:
        # What cannot be run on the meta device may run on another: the server will say.
        logger.debug(f"whether {checkpoint.source} is served is not known beforehand: {error}")
        return
    refuse_on_gpu(architecture, layers, device)
    refuse_rounded_positions(architecture, layers, kv_format, unquantized_by)


def _skip_experts(model: nn.Module) -> None:
    for module in model.modules():
        if is_experts(module):
            module.forward = no_experts
