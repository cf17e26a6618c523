"""Opening a checkpoint, a folder or a Hub id: its config and where its tensors lie, checked before any work.

The meaning of the tensors is defined in `conventions/`.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ...base.errors import UserError
from ...base.log import logger
from ...base.untrusted_files import read_json_object
from ...base.untrusted_names import require_file, require_inside
from ..records.artifact import MANIFEST_NAME, Artifact
from .bitsandbytes import METHOD as BITSANDBYTES
from .bitsandbytes import decoded_bitsandbytes
from .companion_files import WEIGHT_SUFFIXES, CompanionFiles, companion_files
from .config_sections import refuse_malformed, refuse_sizes
from .decoded_tensors import as_decoded
from .gptq_and_awq import AWQ, GPTQ, decoded_awq, decoded_gptq
from .mxfp4 import METHOD as MXFP4
from .mxfp4 import decoded_mxfp4
from .quantization_section import OLD_SECTION, SECTION, with_section
from .safetensors_file import SafetensorsHeader, TensorInfo, read_header

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DECODERS = {
    MXFP4: decoded_mxfp4,
    GPTQ: decoded_gptq,
    AWQ: decoded_awq,
    BITSANDBYTES: decoded_bitsandbytes,
}
"""For each `quant_method`, the function that decodes its tensors to 16-bit tensors."""
OTHER_INPUTS = {
    "images": re.compile(r"^(vision|visual|image|vq|perceptual)\w*config$"),
    "sound": re.compile(r"^(audio|speech|sound)\w*config$"),
}
"""For each kind of input, the names of the config sections that describe a tower for it."""
ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Types of rope whose encoding of long positions depends on the longest request or the server's limit."""
NO_WEIGHT = re.compile(
    r"\.rotary_emb\.inv_freq$|\.position_ids$|\.attn(\.attention)?\.(masked_)?bias$"
    r"|\.(k|v|q|prob)_scale$|\.[kv]_proj\.output_scale$"
)
"""Tensors that are no weights: rotary caches, positions and causal masks that old versions of transformers
saved, and an FP8 KV cache's scales, which `kv_cache.py` reads."""
OTHER_KINDS = {
    "params.json": "its maker's own form (params.json)",
    "*.gguf": "llama.cpp's form (GGUF)",
}
"""Files of checkpoints that have no config.json, and what they are."""
COMMIT = re.compile(r"[0-9a-f]{40}")
ADAPTER_CONFIG = "adapter_config.json"
OTHER_WEIGHTS = ("consolidated", "adapter_")
"""Beginnings of the names of files with the same weights under other names, or with changes to them."""


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint folder; tensors are read only when asked for."""

    folder: Path
    source: str
    """The Hub id, or the folder's path as it was given."""
    revision: str | None
    """The Hub commit; None for a folder."""
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    """The tensors by name, in file order, shard after shard."""
    headers: dict[Path, SafetensorsHeader]
    unindexed: tuple[Path, ...] = ()
    """Shards that the index does not name, such as `mtp.safetensors`; some readers skip them."""
    left_out: tuple[str, ...] = ()
    """Tensors that are in the files but not in `tensors`, since a recipe leaves them out."""
    as_released: bool = False
    """Whether it counts as another tool's quantized release although it has no manifest of ours."""

    @property
    def public_name(self) -> str:
        """Return the Hub id, or the folder's own name: published records use this name."""
        return self.source if self.revision is not None else self.folder.resolve().name

    @cached_property
    def manifest(self) -> Artifact | None:
        """Return the artifact's manifest, read once; None if this is no artifact. Raise UserError if the
        manifest cannot be read.
        """
        return Artifact.read(self.folder) if (self.folder / MANIFEST_NAME).is_file() else None

    @property
    def is_released(self) -> bool:
        """Say whether the release itself is FP8, and FP8 is not just how a source stores 16-bit weights."""
        return self.as_released or (self.folder / MANIFEST_NAME).is_file()

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        return self.config.get(SECTION) or self.config.get(OLD_SECTION)

    @property
    def model_type(self) -> str:
        return self.config["model_type"]

    @property
    def context(self) -> int | None:
        """Return the largest number of tokens in a request, prompt and answer together; None if the config
        does not say.
        """
        context = (self.config.get("text_config") or self.config).get("max_position_embeddings")
        return context if isinstance(context, int) else None

    @property
    def context_served(self) -> int | None:
        """Return the model's context, or a shorter one that the embedded engine can serve: up to where
        position encodings depend on the batch, or where attention becomes sparse."""
        section = self.config.get("text_config") or self.config
        limits = [self.context, None if "index_kpool" in section else section.get("index_topk")]
        for rope in (section.get("rope_parameters"), section.get("rope_scaling")):
            parts = [rope, *rope.values()] if isinstance(rope, Mapping) else []
            for part in parts:
                if (
                    isinstance(part, Mapping)
                    and (part.get("rope_type") or part.get("type")) in ROPES_BY_LENGTH
                ):
                    first = part.get("original_max_position_embeddings")
                    limits.append(first or section.get("original_max_position_embeddings"))
        return min((limit for limit in limits if isinstance(limit, int)), default=None)

    @property
    def other_inputs(self) -> tuple[str, ...]:
        """Return the inputs that the model takes besides text, by the sections of its config: `images`,
        `sound`.
        """
        sections = [key for key, value in self.config.items() if isinstance(value, dict)]
        return tuple(kind for kind, tower in OTHER_INPUTS.items() if any(map(tower.search, sections)))

    @property
    def shards(self) -> list[Path]:
        return list(self.headers)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def without(self, names: Collection[str]) -> "Checkpoint":
        """Return the checkpoint as if it did not have these tensors."""
        left = tuple(name for name in self.tensors if name in names)
        kept = {name: info for name, info in self.tensors.items() if name not in names}
        return replace(self, tensors=kept, left_out=(*self.left_out, *left))

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU, in its own memory; nothing else is read or kept."""
        return self.tensors[name].read()

    def metadata(self, file: Path) -> dict[str, str]:
        """Return the `__metadata__` of one shard's header."""
        return self.headers[file].metadata

    def other_files(self, more: Iterable[str] = ()) -> CompanionFiles:
        """Return the files that go with the weights (tokenizer, chat template, licence, ...), and the files
        that are left out.

        more: patterns of files beyond the known kinds, a recipe's `files`
        """
        return companion_files(self.folder, more)


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Open the folder `model`, or download the Hub repository of that id, and check that the checkpoint is
    whole.
    """
    model = str(model)
    if not model.isprintable():
        raise UserError(f"{model!a} holds characters that cannot be printed; give another name")
    folder = Path(model).expanduser()
    commit = None
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"{model} is a folder; --revision applies to Hub ids only")
        model, commit = _snapshot_of(folder) or (model, None)
    elif folder.exists():
        if folder.suffix == ".gguf":
            raise UserError(
                f"{model} is a GGUF file, which llama.cpp reads; give the folder of its base model"
            )
        raise UserError(f"{model} is a file; give the folder that holds config.json and the weights")
    elif _looks_like_a_path(model):
        raise UserError(f"there is no folder {model}; give a checkpoint folder or a Hub id (ORG/NAME)")
    else:
        from .download import download_checkpoint

        folder, commit = download_checkpoint(model, revision)
    _refuse_adapter(folder)
    config = read_config(folder)
    headers = {shard: read_header(shard) for shard in _find_shards(folder)}
    tensors = _all_tensors(folder, headers)
    unindexed = _unindexed_shards(folder, tensors, headers)
    headers |= unindexed
    for header in unindexed.values():
        tensors |= header.tensors
    config = with_section(config, folder, tensors)
    refuse_malformed(config, str(folder / CONFIG_NAME))
    section = config.get(SECTION) or {}
    decode = DECODERS.get(str(section.get("quant_method")))
    if decode is not None:
        tensors = as_decoded(tensors, decode(model, tensors, section))
    refuse_sizes(config, tensors, str(folder / CONFIG_NAME))
    logger.debug(f"{model}: {len(tensors)} tensors in {folder}")
    return Checkpoint(folder, model, commit, config, tensors, headers, tuple(unindexed))


def _snapshot_of(folder: Path) -> tuple[str, str] | None:
    """Return the Hub id and the commit of a folder in a Hub cache, `models--ORG--NAME/snapshots/COMMIT`, or
    of a link to such a folder; else None."""
    for place in (folder.absolute(), folder.resolve()):
        commit, snapshots, repository = place.name, place.parent.name, place.parent.parent.name
        kind, *names = repository.split("--")
        is_snapshot = snapshots == "snapshots" and COMMIT.fullmatch(commit) is not None
        if is_snapshot and kind == "models" and len(names) in (1, 2) and all(names):
            return "/".join(names), commit
    return None


def _refuse_adapter(folder: Path) -> None:
    """Raise UserError if the folder holds no model but an adapter."""
    weights = [path.name for path in folder.glob("*.safetensors")]
    if (folder / ADAPTER_CONFIG).is_file() and all(name.startswith("adapter_") for name in weights):
        raise UserError(
            f"{folder} is a LoRA adapter, not a whole model: merge it into its base model first "
            "(peft: `merge_and_unload`, then `save_pretrained`), and give that folder"
        )


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "~", os.sep)) or model.count("/") > 1 or model.endswith("/")


def read_config(folder: Path) -> dict[str, Any]:
    """Return `folder`'s config.json, with an architecture transformers knows. Raises UserError otherwise."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        if not any(folder.iterdir()):
            raise UserError(f"{folder} is empty; give a folder that holds config.json and the weights")
        for other, kind in OTHER_KINDS.items():
            if any(folder.glob(other)):
                raise UserError(
                    f"{folder} has no {CONFIG_NAME}: it holds a model in {kind}; give the same model in the "
                    "form of transformers"
                )
        raise UserError(f"{folder} has no {CONFIG_NAME}; give the folder of a whole checkpoint")
    config = read_json_object(require_file(folder, CONFIG_NAME), infinity=True)
    refuse_malformed(config, str(path))
    model_type = config.get("model_type")
    if model_type is None:
        raise UserError(f"unknown architecture: {path} has no `model_type`")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        import transformers

        raise UserError(
            f"unknown architecture {model_type!r} in {path}: transformers {transformers.__version__} has no "
            "such model type. A newer transformers may know this architecture; models with code of their own "
            "are not loaded."
        )
    return config


def _find_shards(folder: Path) -> list[Path]:
    if (folder / INDEX_NAME).is_file():
        names = sorted(set(_weight_map(folder).values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise UserError(
                f"{folder / INDEX_NAME} lists {absent[0]}"
                + (f" and {len(absent) - 1} more shards" if len(absent) > 1 else "")
                + f", absent from {folder}; download or copy the checkpoint again"
            )
        return [require_file(folder, name) for name in names]
    if (folder / SINGLE_NAME).is_file():
        return [require_file(folder, SINGLE_NAME)]
    shards = [require_file(folder, path.name) for path in sorted(folder.glob("*.safetensors"))]
    if not shards:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
        if others:
            raise UserError(
                f"{folder} has no safetensors weights, only {others[0]}; "
                "convert them first: load the model with transformers and call `save_pretrained`"
            )
        raise UserError(f"{folder} has no weights: there is no *.safetensors file in the folder")
    return shards


def _unindexed_shards(
    folder: Path, tensors: Mapping[str, TensorInfo], headers: Mapping[Path, SafetensorsHeader]
) -> dict[Path, SafetensorsHeader]:
    """Return further safetensors files with tensors of their own, each with its header.

    Files that hold the same tensors again, in another precision or under their makers' names, are left out.
    """
    found: dict[Path, SafetensorsHeader] = {}
    known = set(tensors)
    for path in sorted(folder.glob("*.safetensors")):
        if path in headers or path.name.startswith(OTHER_WEIGHTS):
            continue
        header = read_header(require_file(folder, path.name))
        if known.isdisjoint(header.tensors):
            found[path] = header
            known |= header.tensors.keys()
    return found


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX_NAME
    weight_map = read_json_object(require_file(folder, INDEX_NAME)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no `weight_map`; download or copy the checkpoint again")
    for shard in {repr(shard): shard for shard in weight_map.values()}.values():  # a list is no key
        require_inside(shard, str(path))
    return weight_map


def _all_tensors(folder: Path, headers: dict[Path, SafetensorsHeader]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard, header in headers.items():
        for info in sorted(header.tensors.values(), key=lambda info: info.offset):
            if info.name in tensors:
                raise UserError(f"tensor {info.name!r} is in both {tensors[info.name].file} and {shard}")
            tensors[info.name] = info
    if not tensors:
        raise UserError(f"the safetensors files in {folder} hold no tensors")
    if (folder / INDEX_NAME).is_file():
        for name, shard_name in _weight_map(folder).items():
            info_or_none = tensors.get(name)
            if info_or_none is None or info_or_none.file != folder / shard_name:
                raise UserError(
                    f"{folder / INDEX_NAME} says tensor {name!r} is in {shard_name}, but this file has no "
                    "such tensor; index and shards come from different downloads"
                )
    return tensors
