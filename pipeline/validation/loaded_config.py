"""Both models' configs as their readers load them: defaults are filled in, and old and new spellings are
equal.

transformers turns a config.json into a config object of the model's type; vLLM starts from the same object. A
key with its default value is no difference. A key that only one side has is no difference either, unless its
value differs from the other side's default.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from ..checkpoints.checkpoint import Checkpoint

MAY_DIFFER = {
    "_name_or_path": "where the model was saved from",
    "transformers_version": "what it was saved with",
    "dtype": "how tensors are stored; the gate serves the artifact in its own",
    "torch_dtype": "the old name of `dtype`",
    "use_cache": "whether a library keeps keys and values between tokens; the tokens are the same",
    "quantization_config": "what quantizing adds; a check of its own reads it",
    "compression_config": "the old name of `quantization_config`",
    "tie_word_embeddings": "whether one tensor stands for two; both are compared as tensors",
    "bos_token_id": "compared with the tokenizer's files, as a part of their own",
    "eos_token_id": "compared with the tokenizer's files, as a part of their own",
    "pad_token_id": "compared with the tokenizer's files, as a part of their own",
}
"""Keys that quantizing or saving changes, each with the reason why it does not affect what readers
compute."""
ROPE_BASES = ("rope_theta", "rotary_emb_base", "rotary_base")
"""Older names for the base of rotary embeddings, which `rope_parameters` has replaced."""
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
DTYPES = ("dtype", "torch_dtype")


def loaded_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config as transformers loads it, without the keys that may differ; sections of a model's
    parts included.
    """
    written = dict(checkpoint.config)
    return _plain(_as_transformers_loads(CONFIG_MAPPING[checkpoint.model_type], written) or written)


def contradictions(config: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield keys of a config.json that contradict each other: some readers use one key, some the other.

    Each contradiction is told in a few words: `rope_theta is 10000.0 and in rope_parameters 1000000.0`.
    """
    sections = [config.get(name) for name in ROPE_SECTIONS]
    bases = {name: config[name] for name in ROPE_BASES if isinstance(config.get(name), int | float)}
    for name, section in zip(ROPE_SECTIONS, sections, strict=True):
        if isinstance(section, Mapping) and isinstance(section.get("rope_theta"), int | float):
            bases[f"{name}'s rope_theta"] = section["rope_theta"]
    if len(set(bases.values())) > 1:
        yield f"{where}{', '.join(f'{name} is {value:g}' for name, value in bases.items())}"
    if all(isinstance(section, Mapping) for section in sections):
        kinds = [_kind_of_rope(section) for section in sections if isinstance(section, Mapping)]
        if kinds[0] != kinds[1]:
            yield f"{where}rope_parameters is of type {kinds[0]}, rope_scaling of type {kinds[1]}"
    dtypes = {name: str(config[name]).removeprefix("torch.") for name in DTYPES if config.get(name)}
    if len(set(dtypes.values())) > 1:
        yield f"{where}{', '.join(f'{name} is {value}' for name, value in dtypes.items())}"
    for name, section in config.items():
        if name.endswith("_config") and name != "quantization_config" and isinstance(section, Mapping):
            yield from contradictions(section, f"{where}{name}: ")


def changes_beyond(config: Mapping[str, Any]) -> list[int]:
    """Return positions from which on the config makes a model compute otherwise than before, smallest first.

    Positions of this kind are the end of the context that the model was first trained on
    (`original_max_position_embeddings`), a sliding window, a chunk of local attention.
    """
    found = set()
    for section in (config, config.get("text_config") or {}):
        for rope in (section.get("rope_parameters"), section.get("rope_scaling"), section):
            if isinstance(rope, Mapping):
                found.update(_positive(rope.get("original_max_position_embeddings")))
                # One section for each type of layer, as Gemma 3 has them.
                for part in rope.values():
                    if isinstance(part, Mapping):
                        found.update(_positive(part.get("original_max_position_embeddings")))
        if section.get("use_sliding_window", True):
            found.update(_positive(section.get("sliding_window")))
        found.update(_positive(section.get("attention_chunk_size")))
    return sorted(found)


def _positive(value: Any) -> list[int]:
    return (
        [int(value)] if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else []
    )


def _as_transformers_loads(kind: type[Any], written: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config as transformers loads it; None if it cannot, which is reported when the model is
    loaded.
    """
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dict(kind.from_dict(json.loads(json.dumps(written))).to_dict())
    except Exception:
        # Its classes raise what they like at values that they do not expect.
        return None
    finally:
        transformers_logging.set_verbosity(level)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compared keys: without keys that may differ, with values as in JSON."""
    found = {}
    for name, value in config.items():
        if name in MAY_DIFFER or value is None:
            continue
        found[name] = _plain(value) if isinstance(value, Mapping) else value
    return json.loads(json.dumps(found, default=str))


def _kind_of_rope(section: Mapping[str, Any]) -> str:
    return str(section.get("rope_type") or section.get("type") or "default")
