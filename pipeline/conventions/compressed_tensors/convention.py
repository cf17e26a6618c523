"""compressed-tensors: config groups that name modules by pattern, each group in its own scheme.

This file has the part that all schemes share: which module belongs to which group. A scheme reads only those
settings of activations that it supports.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from ....base.errors import UserError
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.weight_format import WEIGHT_FORMATS, Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import CONVENTIONS, EXPORTS, ExportDefaults, StoredWeight
from ..fp8 import stored_float8
from ..stored import FLOAT_DTYPES
from ..targets import LINEAR, as_patterns, first_match, matches
from .all_schemes import SCHEMES
from .scheme import METHOD, Scheme, WritableScheme

WEIGHT = ".weight"
DENSE = "dense"
"""compressed-tensors' format name if only keys and values are quantized, not weights."""
FP8_KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""The only KV format that compressed-tensors can declare."""
MIXED = "mixed-precision"
"""compressed-tensors' name for a checkpoint whose config groups are of several schemes."""


class CompressedTensors(ExportDefaults):
    name = METHOD

    @property
    def reads(self) -> str:
        return f"{METHOD} {', '.join(scheme.reads for _, scheme in SCHEMES.items())} and FP8"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        config = checkpoint.quantization_config or {}
        return config.get("quant_method") == METHOD

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        config = checkpoint.quantization_config or {}
        _refuse_sparsity(checkpoint.source, config)
        groups = config.get("config_groups") or {}
        targets = {target: group for group in groups.values() for target in group.get("targets", [])}
        stored = {}
        for name, module in _compressed(checkpoint):
            target = first_match(targets, module)
            if target is None:
                raise UserError(
                    f"{checkpoint.source}: tensor {name} is packed, but no config group of the quantization "
                    f"config targets {module}"
                )
            group = targets[target]
            group = {**group, "format": group.get("format") or config.get("format")}
            stored[module] = self._stored(checkpoint, module, group)
        if not stored and (groups or config.get("kv_cache_scheme") is None):
            suffixes = " or ".join(dict.fromkeys(scheme.suffix for _, scheme in SCHEMES.items()))
            raise UserError(
                f"{checkpoint.source}: config.json declares {METHOD}, but no tensor ends in {suffixes}: "
                f"the weights are not compressed (quantization_status {config.get('quantization_status')!r})"
            )
        return stored

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        config = checkpoint.quantization_config or {}
        groups = config.get("config_groups") or {}
        targets = [target for group in groups.values() for target in group.get("targets", [])]
        return self.excludes(checkpoint, module) is None and first_match(targets, module) is not None

    def excludes(self, checkpoint: Checkpoint, module: str) -> str | None:
        ignore = (checkpoint.quantization_config or {}).get("ignore") or []
        return next((pattern for pattern in ignore if matches(pattern, module)), None)

    def refuses(self, spec: WeightFormat, module: str, is_embedding: bool = False) -> str | None:
        if _scheme_of(spec) is not None:
            return None
        writable = {name: each for name, scheme in SCHEMES.items() if (each := _as_writable(scheme))}
        if spec.name not in writable:
            formats = [name for name in writable if name in WEIGHT_FORMATS]
            return f"{METHOD} is not written in {spec.name}; it is in {', '.join(formats)}"
        return writable[spec.name].refuses(spec)

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        return _writable(weight.spec).tensors(module, weight, inputs)

    def quantization_config(
        self, specs: Mapping[str, WeightFormat], ignore: Sequence[str], embeddings: Sequence[str] = ()
    ) -> dict[str, Any]:
        modules: dict[WeightFormat, list[str]] = {}
        for module, spec in specs.items():
            modules.setdefault(spec, []).append(module)
        targets = {spec: [LINEAR] for spec in modules} if len(modules) == 1 else as_patterns(modules, ignore)
        for module in embeddings:
            # `Linear` does not name them: a reader that cannot do it has to fail, not to skip them.
            group = targets[specs[module]]
            targets[specs[module]] = [*group, *([] if module in group else [module])]
        formats = list(dict.fromkeys(_writable(spec).format for spec in targets))
        if not formats:
            formats = [DENSE]
        return {
            "quant_method": METHOD,
            "format": formats[0] if len(formats) == 1 else MIXED,
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{index}": _group(spec, targets[spec]) for index, spec in enumerate(targets)
            },
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }

    def kv_cache(self, kv_format: str) -> dict[str, Any] | None:
        return {"kv_cache_scheme": FP8_KV_CACHE} if kv_format == "fp8" else None

    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        return f"{attention}.k_scale", f"{attention}.v_scale"

    def _stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        for _, scheme in SCHEMES.items():
            if scheme.recognizes(group):
                return scheme.stored(checkpoint, module, group)
        weights, activations = group.get("weights") or {}, group.get("input_activations")
        if weights.get("type") == "float" and weights.get("num_bits") == 8:
            return stored_float8(checkpoint, module)
        activation_text = "" if activations is None else (
            f", activations {activations.get('num_bits')}-bit {activations.get('type')} "
            f"({activations.get('strategy')}, dynamic: {activations.get('dynamic')})"
        )  # fmt: skip
        raise UserError(
            f"{checkpoint.source}: {module} is stored as {group['format']!r}, {weights.get('num_bits')}-bit "
            f"{weights.get('type')} weights{activation_text}; Scalegate reads {self.reads}"
        )


def _compressed(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the tensors by which stored modules are recognized, with the module's name; also tensors of
    schemes that are not supported.
    """
    for name, info in checkpoint.tensors.items():
        for _, scheme in SCHEMES.items():
            if name.endswith(scheme.suffix) and (scheme.dtypes is None or info.dtype in scheme.dtypes):
                yield name, name.removesuffix(scheme.suffix)
                break
        else:
            if name.endswith(WEIGHT) and info.dtype not in FLOAT_DTYPES:
                yield name, name.removesuffix(WEIGHT)


def _refuse_sparsity(source: str, config: Mapping[str, Any]) -> None:
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UserError(f"{source}: sparse checkpoints are not read (sparsity format {sparsity!r})")
    if config.get("transform_config"):
        raise UserError(f"{source}: checkpoints with a transform_config (rotations at run time) are not read")


def _writable(spec: WeightFormat) -> WritableScheme:
    scheme = _scheme_of(spec)
    if scheme is None:
        raise ValueError(f"{METHOD} is not written in {spec.label}")
    return scheme


def _scheme_of(spec: WeightFormat) -> WritableScheme | None:
    """Return the scheme that stores weights of `spec`; None if there is none."""
    if spec.name not in SCHEMES:
        return None
    schemes = (SCHEMES[spec.name], *(scheme for _, scheme in SCHEMES.items()))
    writable = (each for scheme in schemes if (each := _as_writable(scheme)) is not None)
    return next((scheme for scheme in writable if scheme.refuses(spec) is None), None)


@cache  # comparing an object with a protocol is slow, and a large model asks for each of its modules
def _as_writable(scheme: Scheme) -> WritableScheme | None:
    return scheme if isinstance(scheme, WritableScheme) else None


def _group(spec: WeightFormat, targets: list[str]) -> dict[str, Any]:
    scheme = _writable(spec)
    return {
        "targets": targets,
        "weights": scheme.weights_config(spec),
        "input_activations": scheme.inputs_config(spec),
        "output_activations": None,
        "format": scheme.format,
    }


CONVENTION = CompressedTensors()
CONVENTIONS.add(METHOD, CONVENTION)
EXPORTS.add(METHOD, CONVENTION)
