"""The unmodified transformers model of a checkpoint with no weights in it: parameters on meta, buffers real.

Not for loading weights (`load_model.py`) nor for naming them (`weight_map.py`).
"""

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ...base.errors import UserError
from ..checkpoints.checkpoint import Checkpoint

MESSAGE_CHARACTERS = 300


def model_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """The checkpoint's transformers config, without its quantization section: that one is ours to read."""
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:
        # transformers raises whatever a bad value in config.json happens to break.
        raise UserError(
            f"{checkpoint.source}: transformers cannot read its config.json (model_type "
            f"{checkpoint.config.get('model_type')!r}): {_one_line(error)}. Models that need their own "
            f"code (trust_remote_code) are not loaded; a newer transformers may know the architecture."
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def build_skeleton(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The model in eval mode: parameters on meta in their dtypes, computed buffers ready on `device`."""
    config = model_config(checkpoint)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise UserError(
            f"{checkpoint.source}: transformers cannot build a causal language model from its config "
            f"(model_type {config.model_type!r}): {_one_line(error)}"
        ) from error
    _compute_buffers(model, torch.device(device))
    _keep_in_fp32(model, dtype)
    return model.requires_grad_(False).eval()


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give the buffers that no checkpoint stores (rotary frequencies, embedding scales) their values.

    transformers' own initialization computes them; on the parameters, still on meta, it does nothing.
    """
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        module._is_hf_initialized = False  # type: ignore[assignment]
    model.initialize_weights()


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Widen the parameters that transformers keeps in fp32 whatever the model's dtype is."""
    plan: dict[str, Any] = model._get_dtype_plan(dtype)
    if not plan:
        return
    patterns = [re.compile(key.replace("*", ".*")) for key in plan]
    for name, parameter in model.named_parameters():
        if any(pattern.search(name) for pattern in patterns):
            parameter.data = parameter.data.float()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text[:MESSAGE_CHARACTERS] if text else type(error).__name__
