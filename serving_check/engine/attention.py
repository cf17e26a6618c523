"""Paged attention as an attention implementation of transformers.

Finds a model's attention layers, checks that they are supported, and routes their calls to a KV format, which
does the arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ...base.errors import UserError
from ...kernels.attention.options import AttentionOptions
from ...layouts.kv.attention_metadata import AttentionMetadata
from ...layouts.kv.layer import KVShape, LayerKV

IMPLEMENTATION = "scalegate_paged"

LAYER_INDEX = "paged_layer_index"
"""Name of an attention module's buffer with its layer index, int64 [] in host memory."""

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}

ROPE_THAT_DEPENDS_ON_THE_BATCH = {"dynamic", "longrope"}

HARMLESS_ARGUMENTS = {"position_ids", "use_cache", "cache_position", "dropout", "is_causal", "layer_type"}
"""Arguments that some models pass to their attention function and that paged attention may ignore."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer as its model calls it."""

    shape: KVShape
    options: AttentionOptions


class Attention(Protocol):
    """Takes the attention calls of a forward pass."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """query [B, H, T, D], key and value [B, H_kv, T, D] → [B, T, H, D_v]."""


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    paged: Attention | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers calls this in every attention layer; `paged` is an argument of the call of the model."""
    if paged is None:
        raise RuntimeError(f"{IMPLEMENTATION} attention runs inside an Engine only")
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    return paged.attend(module, query, key, value, options), None


# No mask function is registered. Without one, transformers returns None at once; with one that returns None,
# it would first search position_ids for packed sequences.
AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)


class PagedAttention:
    """The attention of one step: its metadata, and the storage of every layer."""

    def __init__(
        self,
        layers: Mapping[int, AttentionLayer],
        storage: Mapping[int, LayerKV],
        metadata: AttentionMetadata,
    ):
        self.layers = layers
        self.storage = storage
        self.metadata = metadata

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        output = self.layer(
            cast(int, module.layer_idx),
            token_by_token(query),
            token_by_token(key),
            token_by_token(value),
            options.get("s_aux"),
        )
        return output.view(query.shape[0], query.shape[2], *output.shape[1:])

    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """query [T, H, D], key [T, H_kv, D], value [T, H_kv, D_v] → [T, H, D_v]."""
        options = self.layers[index].options
        return self.storage[index].forward(query, key, value, self.metadata, options, sinks)


def token_by_token(tensor: Tensor) -> Tensor:
    """[B, H, T, D] → [B * T, H, D]; a view, since steps are [B, 1] or [1, T]."""
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3])


class LayerObserver:
    """Records the arguments of every attention layer's call, and refuses those that are not supported."""

    def __init__(self, architecture: str):
        self.architecture = architecture
        self.layers: dict[int, AttentionLayer] = {}
        self.modules: dict[int, nn.Module] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if index is None or index in self.layers:
            raise self._refusal(f"{type(module).__name__} does not attend exactly once per layer")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise self._refusal(f"layer {index} attends bidirectionally")
        known = {"scaling", "sliding_window", "softcap", "s_aux"}
        for name, argument in options.items():
            if name not in known | HARMLESS_ARGUMENTS and argument is not None and argument is not False:
                raise self._refusal(f"layer {index} passes {name!r} to its attention")
        scale = options.get("scaling")
        self.modules[index] = module
        self.layers[index] = AttentionLayer(
            KVShape(
                key.shape[1],
                key.shape[3],
                value.shape[3],
                key.dtype,
                query.shape[1],
                options.get("sliding_window"),
            ).on(key.device),
            AttentionOptions(
                query.shape[3] ** -0.5 if scale is None else scale,
                options.get("sliding_window"),
                options.get("softcap"),
            ),
        )
        batch, heads, tokens, _ = query.shape
        return value.new_zeros(batch, tokens, heads, value.shape[3])

    def _refusal(self, reason: str) -> UserError:
        return unsupported(self.architecture, reason)


def unsupported(architecture: str, reason: str) -> UserError:
    return UserError(
        f"the embedded engine cannot serve {architecture}: {reason}. "
        "Use another engine (--engine vllm, or the URL of a running server)."
    )


def context_length(model: PreTrainedModel, max_model_len: int | None) -> int:
    """The longest context of a request: `max_model_len` if given, else the model's own limit."""
    architecture = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    _check_architecture(model, architecture, config)
    context = config.max_position_embeddings
    length = max_model_len or context
    if length > context:
        raise UserError(f"max_model_len={length} is more than the model's context of {context} tokens")
    for rope in _rope_parameters(config):
        limit = rope.get("original_max_position_embeddings") or context
        if rope.get("rope_type") in ROPE_THAT_DEPENDS_ON_THE_BATCH and length > limit:
            raise unsupported(
                architecture,
                f"past {limit} tokens its {rope['rope_type']!r} position encoding depends on the rest of the "
                f"batch; a context of at most {limit} tokens (max_model_len) works",
            )
    return length


def attention_layers(model: PreTrainedModel) -> dict[int, AttentionLayer]:
    """Switch the model to paged attention, and return its attention layers by index.

    They are found by running two tokens through the model. Each gets a buffer with its index.
    """
    architecture = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    model.set_attn_implementation(IMPLEMENTATION)
    observer = LayerObserver(architecture)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(
            input_ids=tokens,
            position_ids=torch.arange(2, device=model.device)[None],
            use_cache=False,
            logits_to_keep=1,
            paged=observer,
        )
    if len(observer.layers) != config.num_hidden_layers:
        raise unsupported(
            architecture,
            f"{len(observer.layers)} of its {config.num_hidden_layers} layers use AttentionInterface",
        )
    for index, module in observer.modules.items():
        module.register_buffer(LAYER_INDEX, torch.tensor(index, device="cpu"), persistent=False)
    return observer.layers


def _check_architecture(model: PreTrainedModel, architecture: str, config: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise unsupported(architecture, "it has an encoder")
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in SUPPORTED_LAYER_TYPES:
            raise unsupported(architecture, f"it has layers of type {layer_type!r}")
    if model._is_stateful:
        raise unsupported(architecture, "it keeps a recurrent state beside its keys and values")
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        raise unsupported(architecture, "its attention does not go through transformers' AttentionInterface")


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """A model has one such dictionary, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
