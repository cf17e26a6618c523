"""Checks compressed-tensors' quantization section field by field, as the library itself does.

If the library is installed, its own models parse the section. Our own checks find the differences between
readers: a field that one reader skips and another refuses, and sections that contradict the tensors. Reading
a checkpoint is left to `convention.py`, which takes what can be understood.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..targets import REGEX_PREFIX

LIBRARY = "compressed_tensors"
G_IDX = ".weight_g_idx"
REORDERED = ("group", "dynamic", True)
"""Values of `actorder` with which `weight_g_idx` holds each column's group."""


Strategy = Literal["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Arguments(_Strict):
    """The library's QuantizationArgs; `observer` and `observer_kwargs` say how scales were found."""

    num_bits: int
    type: Literal["int", "float"]
    symmetric: bool = True
    group_size: int | None = None
    strategy: Strategy | None = None
    block_structure: list[int] | str | None = None
    dynamic: bool | Literal["local"] | None = False
    actorder: Literal["group", "weight", "static", "dynamic"] | bool | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _sizes_agree(self) -> "_Arguments":
        grouped = self.strategy in ("group", "tensor_group")
        if self.group_size is not None and self.group_size > 0 and self.strategy is not None and not grouped:
            raise ValueError(f"group_size is {self.group_size} and strategy {self.strategy!r}")
        if grouped and not (self.group_size or 0) > 0:
            raise ValueError(f"strategy is {self.strategy!r} and group_size {self.group_size}")
        if self.actorder and self.strategy != "group":
            raise ValueError(f"actorder is {self.actorder!r} and strategy {self.strategy!r}")
        return self


class _Scheme(_Strict):
    targets: list[str]
    weights: _Arguments | None = None
    input_activations: _Arguments | None = None
    output_activations: None = None
    """Must be null: only transformers would round outputs."""
    format: str | None = None


class _Section(_Strict):
    config_groups: dict[str, _Scheme] = {}
    quant_method: str
    format: str
    quantization_status: Literal["compressed"]
    """With any other status, readers would quantize the tensors again."""
    global_compression_ratio: float | None = None
    ignore: list[str] | None = None
    kv_cache_scheme: _Arguments | None = None
    version: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def misreadings(section: Mapping[str, Any], tensors: Sequence[str]) -> Iterator[str]:
    """Yield the fields that readers refuse or interpret differently, each with its value:
    `quantization_status: 'frozen', …`.

    tensors: names of all tensors of the checkpoint
    """
    yield from _refused_by_ours(section)
    yield from _refused_by_theirs(section)
    yield from _contradictions(section, tensors)


def _refused_by_ours(section: Mapping[str, Any]) -> Iterator[str]:
    try:
        _Section.model_validate(dict(section))
    except ValidationError as error:
        for wrong in error.errors():
            field = ".".join(map(str, wrong["loc"])) or "quantization_config"
            if wrong["type"] == "extra_forbidden":
                yield f"{field}: compressed-tensors has no such field"
            elif wrong["type"] == "value_error":
                yield f"{field}: {wrong['msg'].removeprefix('Value error, ')}"
            else:
                yield f"{field}: {wrong['input']!r:.60}, {wrong['msg']}"


def _refused_by_theirs(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems that the library's own models find, if it is installed."""
    if importlib.util.find_spec(LIBRARY) is None:
        return
    library = importlib.import_module(f"{LIBRARY}.quantization")
    try:
        library.QuantizationConfig.model_validate(dict(section))
    except ValidationError as error:
        for wrong in error.errors():
            field = ".".join(map(str, wrong["loc"]))
            yield f"{field}: {wrong['msg']} (compressed-tensors' own words)"
    except (ValueError, NotImplementedError) as error:
        yield f"config_groups: {error} (compressed-tensors' own words)"


def _contradictions(section: Mapping[str, Any], tensors: Sequence[str]) -> Iterator[str]:
    groups = section.get("config_groups")
    groups = groups if isinstance(groups, Mapping) else {}
    ignore = [entry for entry in section.get("ignore") or [] if isinstance(entry, str)]
    indices = {name.removesuffix(G_IDX) for name in tensors if name.endswith(G_IDX)}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        order = weights.get("actorder") if isinstance(weights, Mapping) else None
        if order in REORDERED and not indices:
            yield f"config_groups.{name}.weights.actorder: {order!r}, and no tensor ends in {G_IDX}"
    for entry in ignore:
        if entry[:1].isupper() and not entry.startswith(REGEX_PREFIX):
            yield f"ignore: {entry!r} is a class, of which some readers then take no module as quantized"
    formats = {group.get("format") for group in groups.values() if isinstance(group, Mapping)} - {None}
    whole = section.get("format")
    if len(formats) == 1 and whole not in (*formats, None):
        yield f"format: {whole!r}, and its config group's {next(iter(formats))!r}"
