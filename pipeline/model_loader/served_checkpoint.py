"""A checkpoint in a server's engine process: first its description, then the engine around it.

torch and the models of transformers are imported inside functions: the process that answers clients names
these functions, but never calls them, and needs neither library.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.errors import UserError
from ...base.log import logger
from ...serving_check.engine.options import EngineOptions
from ...serving_check.server.model_description import ModelDescription, SamplingDefaults

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

    from ...serving_check.engine.engine import Engine
    from ..checkpoints.checkpoint import Checkpoint


def engine_of(
    build: Callable[..., "Engine"], folder: Path, options: EngineOptions, description: ModelDescription
) -> "Engine":
    """Return the engine that `build` makes, with the tokenizer of a description."""
    return build(folder, options, description.tokenizer)


def build_engine(
    folder: Path, options: EngineOptions, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> "Engine":
    """Load the model in `folder` and put the engine around it.

    tokenizer: the checkpoint's, if it has been loaded already
    """
    import torch

    from ...layouts.kv.format import KV_FORMATS, largest_of
    from ...serving_check.engine.engine import Engine
    from ..checkpoints.checkpoint import open_checkpoint
    from ..conventions.kv_cache import kv_cache_of
    from ..machine.device import resolve_device, resolve_dtype
    from .attention_shapes import refuse_unserved
    from .load_model import load_model

    checkpoint = open_checkpoint(folder)
    kv_cache = kv_cache_of(checkpoint, options.kv_cache_dtype)
    if largest_of(KV_FORMATS[kv_cache.kv_format]) is not None and not kv_cache.scales:
        logger.warning("no KV scales in the checkpoint; keys and values are stored unscaled")
    device = resolve_device(options.device)
    refuse_unserved(checkpoint, options.max_model_len or 1, torch.device(device), kv_cache.kv_format)
    loaded = load_model(
        checkpoint,
        device=device,
        dtype=resolve_dtype(options.dtype),
        layout=options.layout,
        batch_invariance=options.batch_invariance,
    )
    tokenizer = tokenizer or loaded.tokenizer
    ends = eos_token_ids(loaded.generation_config, loaded.model.config, tokenizer)
    served = replace(options, kv_cache_dtype=kv_cache.kv_format)
    return Engine(loaded.model, served, ends, kv_cache.scales, tokenizer)


def describe(folder: Path, chat_template: Path | None = None) -> ModelDescription:
    """Return the API process's knowledge of the model: its tokenizer and its maker's sampling defaults.

    chat_template: a file with a chat template that replaces the tokenizer's own
    """
    from ..checkpoints.checkpoint import open_checkpoint
    from ..checkpoints.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(str(folder))
    tokenizer = load_tokenizer(checkpoint)
    if chat_template is not None:
        if tokenizer is None:
            raise UserError(f"{folder} has no tokenizer, so a chat template is of no use")
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the chat template cannot be read from {chat_template} ({error})") from error
    return ModelDescription(tokenizer, sampling_defaults(checkpoint))


def eos_token_ids(
    generation: "GenerationConfig", config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase | None"
) -> frozenset[int]:
    """Return every token that ends a sequence: from the generation config, else from the model's config; and
    the tokenizer's.
    """
    ends = generation.eos_token_id
    for section in (config, config.get_text_config(decoder=True)):
        ends = getattr(section, "eos_token_id", None) if ends is None else ends
    listed = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        listed.append(tokenizer.eos_token_id)
    return frozenset(listed)


def sampling_defaults(checkpoint: "Checkpoint") -> SamplingDefaults:
    """Return the sampling defaults of the checkpoint's maker, from `generation_config.json`."""
    from ...base.untrusted_files import read_json_object

    path = checkpoint.folder / "generation_config.json"
    return SamplingDefaults.from_generation_config(read_json_object(path) if path.is_file() else {})
