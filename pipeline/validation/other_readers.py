"""How other readers would read an artifact's files: what they would refuse, skip or read differently.

The readers on the card (transformers, vLLM, SGLang, TensorRT-LLM) read the same files by their own rules: one
reader reads every safetensors file of a folder, another only those that the index names; one reads
`hf_quant_config.json`, another the section in config.json. This file has the checks that need only the files.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ...base.untrusted_files import read_json_object
from ...base.untrusted_names import require_file
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.quantization_section import OLD_SECTION
from ..conventions.compressed_tensors.scheme import METHOD as COMPRESSED_TENSORS
from ..conventions.compressed_tensors.strict_section import misreadings as strict_misreadings
from ..conventions.modelopt import SIDECAR, stored_kv_cache
from .loaded_config import contradictions


def misreadings(artifact: Checkpoint) -> tuple[str, ...]:
    """Return each problem with its file and field, in the order of files. Raise UserError if a file cannot be
    read.
    """
    return tuple(_all(artifact))


def _all(artifact: Checkpoint) -> Iterator[str]:
    for path in sorted(artifact.folder.glob("*.safetensors")):
        if path not in artifact.shards or path in artifact.unindexed:
            yield f"{path.name}: no index names it, and some readers load every safetensors file"
    for text in contradictions(artifact.config):
        yield f"config.json: {text}"
    if OLD_SECTION in artifact.config:
        yield f"config.json: {OLD_SECTION} is skipped by today's readers; its name is quantization_config"
    section = artifact.quantization_config
    if section is not None and section.get("quant_method") == COMPRESSED_TENSORS:
        for text in strict_misreadings(section, list(artifact.tensors)):
            yield f"config.json: quantization_config.{text}"
    if section is not None and (artifact.folder / SIDECAR).is_file():
        yield from _beside(section, read_json_object(require_file(artifact.folder, SIDECAR)))


def _beside(section: Mapping[str, Any], sidecar: Mapping[str, Any]) -> Iterator[str]:
    """Yield contradictions between ModelOpt's older file and the section in config.json."""
    older = sidecar.get("quantization")
    if not isinstance(older, Mapping):
        yield f"{SIDECAR}: quantization should be a JSON object"
        return
    excluded = section.get("ignore") or section.get("exclude_modules") or []
    for field, here, there in (
        ("quant_algo", section.get("quant_algo"), older.get("quant_algo")),
        ("kv_cache_quant_algo", stored_kv_cache(section), stored_kv_cache(older)),
        ("exclude_modules", sorted(map(str, excluded)), sorted(map(str, older.get("exclude_modules") or []))),
    ):
        if here != there:
            yield f"{SIDECAR}: {field} is {_shown(there)}, in config.json {_shown(here)}"


def _shown(value: Any) -> str:
    return f"{value!r:.60}"
