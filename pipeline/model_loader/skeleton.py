"""The unmodified transformers model of a checkpoint with no weights in it: parameters on meta, buffers real.

The language model of a multimodal checkpoint is found in whichever class transformers has for it. Weights are
loaded in `load_model.py` and named in `weight_map.py`.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...base.errors import UserError
from ...base.log import logger
from ..checkpoints.checkpoint import CONFIG_NAME, Checkpoint
from .kept_logits import take_logits_to_keep
from .tied_modules import share_tied_modules
from .weight_map import OUTSIDE, map_weights

AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
"""The kinds of transformers classes that hold a language model, the leanest first."""
THINKER = "thinker_config"
"""The config of the part of Qwen's omni models that generates text."""
MESSAGE_CHARACTERS = 300
DTYPES, TORCH = ("dtype", "torch_dtype"), "torch."
"""The config's keys for the dtype of weights, and what Python prints before the names of dtypes."""


def model_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """Return the checkpoint's transformers config, without its quantization section, which we read
    ourselves.
    """
    _refuse_unknown_dtypes(checkpoint)
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:
        # transformers raises whatever a bad value in config.json happens to break.
        raise UserError(
            f"{checkpoint.source}: transformers cannot read its config.json (model_type "
            f"{checkpoint.config.get('model_type')!r}): {_one_line(error)}. Models that need their own "
            f"code (trust_remote_code) are not loaded; a newer transformers may know the architecture."
        ) from error
    for section in (config, config.get_text_config()):
        if hasattr(section, "quantization_config"):
            del section.quantization_config
    return config


def _refuse_unknown_dtypes(checkpoint: Checkpoint) -> None:
    """Raise UserError if the config names a dtype as Python prints it: transformers reads `bfloat16`, not
    `torch.bfloat16`.
    """
    for section in (checkpoint.config, checkpoint.config.get("text_config") or {}):
        for key in DTYPES:
            name = str(section.get(key))
            if name.startswith(TORCH):
                raise UserError(
                    f"{checkpoint.folder / CONFIG_NAME} has `{key}: {name}`, which transformers does not "
                    f"read; write {name.removeprefix(TORCH)}"
                )


def build_skeleton(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Return the model in eval mode: parameters on meta in their dtypes, computed buffers ready on
    `device`.
    """
    model = meta_model(checkpoint, dtype)
    _compute_buffers(model, torch.device(device))
    _keep_in_fp32(model, dtype)
    take_logits_to_keep(model)
    share_tied_modules(model)
    return model.requires_grad_(False).eval()


def meta_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return the language model, all of it on meta, with the towers that lie in the checkpoint beside it.

    The class is the first of transformers' classes that has a place for the checkpoint's towers, or is known
    to leave them out. If the model cannot be built with its towers, the result is the language model alone.
    """
    config = model_config(checkpoint)
    # Of a tower that is quantized, biases and norms tell: their names are as in the model.
    towers = [n for n in checkpoint.tensors if OUTSIDE.search(n) and n.endswith((".weight", ".bias"))]
    first_error: Exception | None = None
    for auto_class, section in _classes_and_configs(config):
        try:
            model = _on_meta(auto_class, section, dtype)
            _require_embeddings(model)
        except Exception as error:
            # transformers raises whatever a bad value in config.json happens to break.
            first_error = first_error or error
            continue
        if not map_weights(model, towers).unexpected:
            return model
    text = config.get_text_config(decoder=True)
    if text is not config and type(text) in AutoModelForCausalLM._model_mapping:
        try:
            return _on_meta(AutoModelForCausalLM, text, dtype)
        except Exception as error:
            first_error = first_error or error
    reason = _no_class(config) if first_error is None else _one_line(first_error)
    raise UserError(
        f"{checkpoint.source}: transformers cannot build a causal language model from its config "
        f"(model_type {config.model_type!r}): {reason}"
    ) from first_error


def auto_class_of(checkpoint: Checkpoint, model: nn.Module) -> Any:
    """Return transformers' auto class for `model`'s class in this checkpoint; else its auto class for
    text.
    """
    classes = _auto_classes(model_config(checkpoint)).items()
    return next((auto for auto, made in classes if made is type(model)), AutoModelForCausalLM)


def auto_class_name(model_type: str | None) -> str:
    """Return the auto class by which transformers' users load a model of this type."""
    if model_type is None or model_type not in CONFIG_MAPPING:
        return AutoModelForCausalLM.__name__
    config = CONFIG_MAPPING[model_type]
    return next((c for c in AUTO_CLASSES if config in c._model_mapping), AutoModelForCausalLM).__name__


def other_models(checkpoint: Checkpoint, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield the checkpoint in further classes of transformers, on meta: other programs may load it with those
    classes.
    """
    config = model_config(checkpoint)
    for auto_class, made in _auto_classes(config).items():
        if made is type(model):
            continue
        try:
            yield _on_meta(auto_class, config, model.dtype)
        except Exception as error:
            # Its libraries may be absent: then nobody here can say how it names its layers.
            logger.debug(f"{checkpoint.source} is not looked at as {made}: {error}")


def _auto_classes(config: PretrainedConfig) -> dict[Any, Any]:
    """Return the auto classes that have a class for this config, each with that class; of several auto
    classes with the same class, one.
    """
    found: dict[Any, Any] = {}
    for auto_class in AUTO_CLASSES:
        if type(config) in auto_class._model_mapping:
            made = auto_class._model_mapping[type(config)]
            if made not in found.values():
                found[auto_class] = made
    return found


def _on_meta(auto_class: Any, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=dtype)


def _classes_and_configs(config: PretrainedConfig) -> Iterator[tuple[Any, PretrainedConfig]]:
    """Yield the auto classes for the config, then those for the part of an omni model that generates text."""
    thinker = getattr(config, THINKER, None)
    sections: list[PretrainedConfig] = [config] if thinker is None else [config, thinker]
    for section in sections:
        for auto_class in _auto_classes(section):
            yield auto_class, section


def _require_embeddings(model: PreTrainedModel) -> None:
    """Raise ValueError for a class like Qwen2.5-Omni's, which holds models but is none."""
    try:
        model.get_input_embeddings()
    except NotImplementedError as error:
        raise ValueError(f"{type(model).__name__} takes no tokens; the models that it holds do") from error


def _no_class(config: PretrainedConfig) -> str:
    return f"no class of it generates text from {type(config).__name__}"


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give the buffers that no checkpoint stores (rotary frequencies, embedding scales) their values.

    transformers' own initialization computes the buffers; on the parameters, still on meta, it does nothing.
    """
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        module._is_hf_initialized = False  # type: ignore[assignment]
    model.initialize_weights()


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Widen the parameters that transformers always keeps in fp32, whatever the model's dtype is."""
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
