"""A checkpoint's KV cache: the format that it was made for, and the scales of that format.

Storing keys and values is left to `layouts/kv/format.py`. Format and scales are read as vLLM reads them:
`kv_cache_scheme` of compressed-tensors and ModelOpt, `kv_cache_quant_algo` of ModelOpt's sidecar, and
`k_scale` and `v_scale` tensors, all of which are multipliers. If no convention can declare a format, the
artifact's `scalegate.json` does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...base.untrusted_files import read_json_object
from ...layouts.kv.format import KV_FORMATS, KVScales, largest_of
from ...serving_check.engine.options import AUTO, UNQUANTIZED
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config_sections import refuse_malformed_quantization
from ..records.artifact import MANIFEST_NAME
from .modelopt import SIDECAR, stored_kv_cache

SCALE = re.compile(
    r"\.(?P<layer>\d+)\.[^.]+\.(?:(?P<of>[kv])_scale|(?P<of_proj>[kv])_proj\.(?:[kv]|output)_scale)$"
)
"""Names of scales: `…layers.3.self_attn.k_scale`, ModelOpt's `…k_proj.k_scale`, the older
`…k_proj.output_scale`."""


@dataclass(frozen=True)
class KVCache:
    """How to store keys and values: a name in `KV_FORMATS`, and the scales by layer."""

    kv_format: str
    scales: Mapping[int, KVScales] = field(default_factory=dict)


def kv_cache_of(checkpoint: Checkpoint, asked: str = AUTO) -> KVCache:
    """Return the KV cache to serve `checkpoint` with: the format `asked` for, or for `auto` the one it
    declares.
    """
    kv_format = _require_format(checkpoint, declared_kv_format(checkpoint)) if asked == AUTO else asked
    return KVCache(kv_format, _scales(checkpoint) if largest_of(KV_FORMATS[kv_format]) is not None else {})


def declared_kv_format(checkpoint: Checkpoint) -> str:
    """Return a name in `KV_FORMATS`, or the checkpoint's name of an unsupported format.

    Return the manifest's format if there is a manifest: the manifest knows every format, and was written with
    the config.
    """
    in_config = _in_config(checkpoint)
    if checkpoint.manifest is None:
        return in_config
    recorded = checkpoint.manifest.kv_cache
    if in_config not in (UNQUANTIZED, recorded):
        raise UserError(
            f"{checkpoint.source}: config.json declares the KV format {in_config}, but {MANIFEST_NAME} "
            f"declares {recorded}; quantize again"
        )
    return recorded


def _require_format(checkpoint: Checkpoint, kv_format: str) -> str:
    if kv_format not in KV_FORMATS:
        raise UserError(
            f"{checkpoint.source} declares a KV cache of {kv_format}, which Scalegate's engine lacks. "
            f"Choose a KV format with --kv-cache-dtype: {', '.join(KV_FORMATS)}"
        )
    return kv_format


def _in_config(checkpoint: Checkpoint) -> str:
    config = dict(checkpoint.quantization_config or {})
    sidecar = checkpoint.folder / SIDECAR
    if sidecar.is_file():
        section = read_json_object(sidecar).get("quantization")
        refuse_malformed_quantization(section, f"{sidecar}: `quantization`")
        config = {**(section or {}), **config}
    scheme: Mapping[str, Any] | None = config.get("kv_cache_scheme")
    algorithm = config.get("kv_cache_quant_algo")
    if scheme is None and algorithm is None:
        return UNQUANTIZED
    return stored_kv_cache(config) or str(algorithm or dict(scheme or {}))


def _scales(checkpoint: Checkpoint) -> dict[int, KVScales]:
    found: dict[int, dict[str, Tensor]] = {}
    for name in checkpoint.tensors:
        match = SCALE.search(name)
        if match is not None:
            of = match["of"] or match["of_proj"]
            found.setdefault(int(match["layer"]), {})[of] = _scale(checkpoint, name)
    for layer, scales in found.items():
        if len(scales) < 2:
            raise UserError(f"{checkpoint.source}: layer {layer} has a KV scale for {min(scales)} only")
    return {layer: KVScales(scales["k"], scales["v"]) for layer, scales in found.items()}


def _scale(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return the scale in the tensor `name`, fp32 [1] or [H_kv]."""
    config = checkpoint.config.get("text_config") or checkpoint.config
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    scale = checkpoint.read(name).to(torch.float32).reshape(-1)
    if len(scale) not in (1, heads):
        raise UserError(
            f"{checkpoint.source}: {name} has {len(scale)} scales; give one, or one for each of {heads} heads"
        )
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise UserError(f"{checkpoint.source}: {name} holds a scale that is not above 0")
    return scale
