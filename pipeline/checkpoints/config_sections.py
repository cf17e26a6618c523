"""The sections of a config.json that Scalegate reads itself: their types, and sizes that fit the weights.

transformers checks everything else in the config. `conventions/` defines what a quantization section means.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from ...base.errors import UserError
from .safetensors_file import TensorInfo

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_nextn_predict_layers")
SIZES = (
    "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "num_experts",
    "num_local_experts", "n_routed_experts", "kv_lora_rank", "q_lora_rank",
    "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
HARMLESS = 1 << 16
"""A size that is accepted whatever the weights' sizes are: a model of this size is built at once."""
AGAIN = "download or copy the checkpoint again"


@dataclass(frozen=True)
class _Group:
    targets: list[str] = field(default_factory=list)
    weights: dict[str, Any] | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


@dataclass(frozen=True)
class _Quantization:
    """The keys that the conventions read from `quantization_config` and from ModelOpt's own file, among
    others.
    """

    quant_method: str | None = None
    quant_algo: str | None = None
    format: str | None = None
    config_groups: dict[str, _Group] | None = None
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None
    modules_to_not_convert: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    kv_cache_quant_algo: str | None = None
    sparsity_config: dict[str, Any] | None = None
    weight_block_size: (
        Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=2, max_length=2)] | None
    ) = None


_QUANTIZATION: TypeAdapter[_Quantization] = TypeAdapter(_Quantization)


def refuse_malformed(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError if a section that is read here and in `conventions/` has values of other types than it
    should.
    """
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise UserError(f"{where}: `text_config` should be a JSON object, not {type(text).__name__}; {AGAIN}")
    for name in ("quantization_config", "compression_config"):
        refuse_malformed_quantization(config.get(name), f"{where}: `{name}`")


def refuse_malformed_quantization(section: Any, where: str) -> None:
    if section is None:
        return
    if not isinstance(section, dict):
        raise UserError(f"{where} should be a JSON object, not {type(section).__name__}; {AGAIN}")
    try:
        _QUANTIZATION.validate_python(section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        key = key if key.isprintable() else ascii(key)
        raise UserError(f"{where} is malformed at {key}: {first['msg']}; {AGAIN}") from error


def refuse_sizes(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], where: str) -> None:
    """Raise UserError if the config describes a model far larger than its weights, which nobody could
    build.
    """
    largest = max((length for info in tensors.values() for length in info.shape), default=0)
    for section in (config, config.get("text_config") or {}):
        for names, limit, of in (
            (LAYERS, len(tensors), f"{len(tensors)} tensors"),
            (SIZES, max(largest, HARMLESS), f"no dimension above {largest}"),
        ):
            for name in names:
                value = section.get(name)
                if isinstance(value, int | float) and value > limit:
                    raise UserError(f"{where}: `{name}` is {value:.6g}, and the weights have {of}; {AGAIN}")
