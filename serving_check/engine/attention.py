"""Paged attention as an attention implementation of transformers.

This module finds a model's attention layers, checks that they are supported, and routes their calls to a KV
format, which does the arithmetic.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ...base.errors import UserError
from ...base.log import logger
from ...base.option_fields import flag
from ...kernels.attention.options import AttentionOptions
from ...layouts.kv.attention_metadata import AttentionMetadata
from ...layouts.kv.layer import KVShape, LayerKV
from ...layouts.states.state_format import StateKey, StateShape
from .special_attention.long_rope import LONGROPE, LongRequests, hook_long_rope
from .special_attention.own_attention import Alibi, attends_itself, route_attention
from .special_attention.sparse_attention import CHOSEN_KEYS, dense_length, skip_indexers, unread_mask
from .state_layers import StateObserver, hook_state_layers, keeps_a_state, taking_states
from .unsupported import unsupported

IMPLEMENTATION = "scalegate_paged"

LAYER_INDEX = "paged_layer_index"
"""Name of an attention module's buffer with its layer index, int64 [] in host memory."""

REPEATED = 1 << 16
"""A layer that attends several times for each token has storage for each time: the n-th, counted from 0, is
found at its index plus n times this number."""
UNSTATED_CONTEXT = 8192
"""The longest context, in tokens, of a model with states if neither its config nor the user sets a limit."""

CHUNKED = "chunked_attention"
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", CHUNKED}
STATE_LAYER_TYPES = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"}
"""Layers with a state; `hybrid` ones attend too."""
LONE_LAYER_TYPES = {"mlp", "moe"}
"""Types of layers in Nemotron-H that keep neither keys and values nor a state."""

DYNAMIC = "dynamic"

HARMLESS_ARGUMENTS = {
    "cache_position",
    "dropout",
    "is_causal",
    "layer_type",
    "logits_to_keep",
    "position_ids",
    "use_cache",
}
"""Arguments that some models pass to their attention function and that paged attention may ignore."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer as its model calls it."""

    shape: KVShape
    options: AttentionOptions
    chunk: int | None = None
    """Tokens of a chunk: a query sees the keys of its own chunk only. None if there are no chunks."""
    temperature: "Temperature | None" = None
    alibi: Alibi | None = None

    @property
    def only_attends(self) -> bool:
        """Say whether queries and keys go to the storage as they are."""
        return self.temperature is None and self.alibi is None


@dataclass(frozen=True)
class Temperature:
    """Llama 4's temperature: queries are scaled by a factor that grows with their position."""

    scale: float
    floor: float

    def scaled(self, query: Tensor, positions: Tensor) -> Tensor:
        """Scale query [T, H, D] at positions int64 [T]."""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        factor = torch.log1p(steps) * self.scale + 1.0
        return (query * factor[:, None, None]).to(query.dtype)


@dataclass(frozen=True)
class ServedLayers:
    """The state that a model's layers keep for each request."""

    attention: dict[int, AttentionLayer]
    """The attention layers by their index."""
    states: dict[StateKey, StateShape] = field(default_factory=dict)
    original_context: int | None = None
    """The length beyond which a request is computed with other rotary frequencies; None without LongRoPE."""

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all states of a request."""
        return sum(shape.bytes_per_request for shape in self.states.values())

    @property
    def state_bytes_by_format(self) -> dict[str, int]:
        """Return the bytes of all states by state format and dtype, as `mamba2 float32`."""
        sums: Counter[str] = Counter()
        for key, shape in self.states.items():
            sums[f"{key.name} {str(shape.dtype).removeprefix('torch.')}"] += shape.bytes_per_request
        return dict(sums)


class Attention(Protocol):
    """Takes the attention calls of a forward pass."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Attend for query [B, H, T, D], key and value [B, H_kv, T, D]; return [B, T, H, D_v]."""


_ATTENTION: ContextVar[Attention | None] = ContextVar("takes the calls of the running model", default=None)


@contextmanager
def taking_calls(attention: Attention) -> Iterator[None]:
    """Inside the `with` block, take the attention calls of models whose layers pass no further arguments to
    their attention.
    """
    token = _ATTENTION.set(attention)
    try:
        yield
    finally:
        _ATTENTION.reset(token)


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
    paged = _ATTENTION.get() if paged is None else paged
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
        self._calls: Counter[int] = Counter()

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
        # Some models view it in another shape, which needs it contiguous.
        return output.contiguous().view(query.shape[0], query.shape[2], *output.shape[1:])

    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend for query [T, H, D], key [T, H_kv, D], value [T, H_kv, D_v]; return [T, H, D_v]."""
        index = next_call(index, self._calls)
        layer = self.layers[index]
        if layer.temperature is not None:
            query = layer.temperature.scaled(query, self.metadata.positions)
        if layer.alibi is not None:
            query, key = layer.alibi.appended(query, key, self.metadata.positions, layer.options.scale)
        return self.storage[index].forward(query, key, value, self.metadata, layer.options, sinks)


def next_call(index: int, calls: Counter[int]) -> int:
    """Return the key of the layer's storage for this call of its attention; `calls` counts the calls in one
    step.
    """
    calls[index] += 1
    return index + (calls[index] - 1) * REPEATED


def token_by_token(tensor: Tensor) -> Tensor:
    """Reshape [B, H, T, D] to [B * T, H, D] as a view, since steps are [B, 1] or [1, T]."""
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3])


class LayerObserver:
    """Records the arguments of every attention layer's call, and refuses unsupported arguments."""

    def __init__(self, architecture: str, config: Any, is_sparse: bool):
        """config: the language model's config; is_sparse: whether it has indexers, which are skipped"""
        self.architecture = architecture
        self.config = config
        self.known = HARMLESS_ARGUMENTS | {"alibi", "scaling", "sliding_window", "softcap", "s_aux"}
        self.known |= CHOSEN_KEYS if is_sparse else set()
        self.layers: dict[int, AttentionLayer] = {}
        self.modules: dict[int, nn.Module] = {}
        self._calls: Counter[int] = Counter()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if index is None:
            raise self._refusal(f"{type(module).__name__} does not say which layer it belongs to")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise self._refusal(f"layer {index} attends bidirectionally")
        for name, argument in options.items():
            if name not in self.known and argument is not None and argument is not False:
                raise self._refusal(f"layer {index} passes {name!r} to its attention")
        scale, chunk = options.get("scaling"), self._chunk(index)
        alibi = None if options.get("alibi") is None else Alibi.of(options["alibi"])
        self.modules[index] = module
        self.layers[next_call(index, self._calls)] = AttentionLayer(
            KVShape(
                key.shape[1],
                key.shape[3] + (0 if alibi is None else 2),
                value.shape[3],
                key.dtype,
                query.shape[1],
                options.get("sliding_window") or chunk,
            ).on(key.device),
            AttentionOptions(
                query.shape[3] ** -0.5 if scale is None else scale,
                options.get("sliding_window"),
                options.get("softcap"),
            ),
            chunk,
            _take_temperature(module),
            alibi,
        )
        batch, heads, tokens, _ = query.shape
        return value.new_zeros(batch, tokens, heads, value.shape[3])

    def _chunk(self, index: int) -> int | None:
        layer_types = getattr(self.config, "layer_types", None) or ()
        is_chunked = index < len(layer_types) and layer_types[index] == CHUNKED
        return self.config.attention_chunk_size if is_chunked else None

    def _refusal(self, reason: str) -> UserError:
        return unsupported(self.architecture, reason)


def _take_temperature(module: nn.Module) -> Temperature | None:
    """Return Llama 4's temperature, taken from a layer, which would count positions from each step's first
    token.
    """
    is_tuned = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    if not is_tuned and not hasattr(module, "paged_temperature"):
        return None
    if is_tuned:
        temperature = Temperature(cast(float, module.attn_scale), cast(float, module.floor_scale))
        module.attn_temperature_tuning = False  # type: ignore[assignment]
        module.paged_temperature = temperature  # type: ignore[assignment]
    return cast(Temperature, module.paged_temperature)


def context_length(
    model: PreTrainedModel,
    max_model_len: int | None,
    shorter_by: str = "",
) -> int:
    """Return the longest context of a request: `max_model_len` if given, else the model's own limit.

    shorter_by: the options by which a user shortens requests, if not by the one for max_model_len
    """
    architecture = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    _check_architecture(model, architecture, config)
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    if context is None and not any(keeps_a_state(each) or attends_itself(each) for each in model.modules()):
        raise unsupported(architecture, "its config says no max_position_embeddings")
    if context is None:
        context = max_model_len or UNSTATED_CONTEXT
        if max_model_len is None:
            logger.warning(
                f"{architecture} is served with contexts of {context} tokens: its config gives no bound. "
                f"For longer ones, give {flag('max_model_len')}"
            )
    if max_model_len is not None and max_model_len > context:
        raise UserError(f"max_model_len={max_model_len} is more than the model's context of {context} tokens")
    served, reason = min(_limits(config, context))
    if (max_model_len or 0) > served:
        options = shorter_by or f"{flag('max_model_len')} {served}"
        raise unsupported(
            architecture,
            f"past {served} tokens {reason}; requests of at most {served} tokens, prompt and answer "
            f"together, are served ({options})",
        )
    if max_model_len is None and served < context:
        logger.warning(
            f"{architecture} is served with contexts of {served} tokens, not of {context}: past {served} "
            f"{reason}"
        )
    return max_model_len or served


def _limits(config: Any, context: int) -> Iterator[tuple[int, str]]:
    """Yield the context lengths up to which the model can be served, each with what would change beyond
    it.
    """
    yield context, ""
    for layer_type in _layer_types(config):
        length = dense_length(config, layer_type)
        if length is not None:
            yield length, "its attention is sparse"
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == DYNAMIC:
            limit = rope.get("original_max_position_embeddings") or context
            yield limit, f"its {DYNAMIC!r} position encoding depends on the rest of the batch"


def _original_context(config: Any) -> int | None:
    """Return the length beyond which requests have other rotary frequencies; None without LongRoPE."""
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == LONGROPE:
            return cast(int, rope["original_max_position_embeddings"])
    return None


def follow_lengths(model: PreTrainedModel, table: tuple[int, int], page_size: int) -> LongRequests | None:
    """Make a model with LongRoPE look at the length of each request, and return what notes which are long.

    table: the rows and the width of the pool's block table
    Return None for a model without LongRoPE, and if no request is longer than its original context.
    """
    rows, longest = table[0], table[1] * page_size
    original_context = _original_context(model.config.get_text_config(decoder=True))
    if original_context is None or longest <= original_context:
        return None
    hook_long_rope(model, original_context, longest)
    return LongRequests(rows, model.device)


def attention_layers(model: PreTrainedModel) -> dict[int, AttentionLayer]:
    """Return the layers of `served_layers`, for a model without states."""
    return served_layers(model).attention


def served_layers(model: PreTrainedModel) -> ServedLayers:
    """Switch the model to paged attention and states in slots, and return what its layers keep.

    Attention layers are found by running two tokens through the model. Each layer gets a buffer with its
    index.
    """
    architecture = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    _route_attention(model, config)
    hook_state_layers(model, architecture)
    _tell_shared_layers_their_index(model)
    observer, states = LayerObserver(architecture, config, skip_indexers(model)), StateObserver()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.inference_mode(), taking_calls(observer), taking_states(states):
        _run(model, architecture, tokens, observer)
    count = config.num_hidden_layers
    served = _served(config, count, set(observer.layers), {key.layer for key in states.shapes})
    if served != count:
        raise unsupported(
            architecture,
            f"{served} of its {count} layers use AttentionInterface or keep a known state",
        )
    for index, module in observer.modules.items():
        module.register_buffer(LAYER_INDEX, torch.tensor(index, device="cpu"), persistent=False)
    found = ServedLayers(observer.layers, states.shapes, _original_context(config))
    refuse_on_gpu(architecture, found, model.device)
    return found


def _run(model: PreTrainedModel, architecture: str, tokens: torch.Tensor, observer: LayerObserver) -> None:
    """Run tokens [1, T] through the model. Raise UserError if its forward cannot be run like this."""
    try:
        model(
            input_ids=tokens,
            position_ids=torch.arange(tokens.shape[1], device=tokens.device)[None],
            attention_mask=unread_mask(model, tokens.device),
            use_cache=False,
            logits_to_keep=1,
            paged=observer,
        )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        # transformers raises whatever a config that lacks something, or a class of another kind, breaks. What
        # only the meta device cannot run may run on another.
        if tokens.is_meta and isinstance(error, RuntimeError) and "meta" in str(error).lower():
            raise
        raise unsupported(
            architecture, f"its forward raises {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _route_attention(model: PreTrainedModel, config: Any) -> None:
    if not any(map(attends_itself, model.modules())):
        model.set_attn_implementation(IMPLEMENTATION)
        return
    if model.device.type == "cuda":
        logger.warning(f"{type(model).__name__} computes attention itself, and was run on CPUs only so far")
    # For such classes transformers would only warn. Without the name it would make masks, which nobody reads.
    config._attn_implementation_internal = IMPLEMENTATION
    route_attention(model, lambda *args, **options: paged_attention_forward(*args, **options)[0])


def refuse_on_gpu(architecture: str, layers: ServedLayers, device: torch.device) -> None:
    """Raise UserError if the device is a GPU, and layers have ALiBi."""
    if device.type == "cuda" and any(layer.alibi is not None for layer in layers.attention.values()):
        raise unsupported(architecture, "attention with ALiBi is served on a CPU only so far")


def _served(config: Any, count: int, attending: set[int], with_states: set[int]) -> int:
    """Return the number of layers that behave as their type says; in a model without types each layer attends
    or keeps a state.
    """
    types = _layer_types(config) or list(getattr(config, "layers_block_type", None) or ())
    # Those of Llama 3.2 Vision attend to images only, and are passed over where there are none.
    done = {index % REPEATED for index in attending} | set(
        getattr(config, "cross_attention_layers", None) or ()
    )
    if not types:
        # HRM counts a layer as often as it attends.
        layers = done | with_states
        return len(attending) if len(layers) != count == len(attending) else len(layers)
    without_attention = STATE_LAYER_TYPES - {"hybrid", "hybrid_sliding"}
    return sum(
        layer_type in LONE_LAYER_TYPES
        or index in done
        or (layer_type in without_attention and index in with_states)
        for index, layer_type in enumerate(types)
    )


def _check_architecture(model: PreTrainedModel, architecture: str, config: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise unsupported(architecture, "it has an encoder")
    has_states = any(keeps_a_state(module) for module in model.modules())
    supported = SUPPORTED_LAYER_TYPES
    if has_states:
        supported = supported | STATE_LAYER_TYPES | LONE_LAYER_TYPES
    for layer_type in _layer_types(config):
        if layer_type not in supported and dense_length(config, layer_type) is None:
            raise unsupported(architecture, f"it has layers of type {layer_type!r}")
    # Of classes that may keep a state, layer types tell which models do.
    if model._is_stateful and not has_states and not _layer_types(config):
        raise unsupported(architecture, "it keeps a recurrent state of a kind that is not known here")
    # transformers' flag for backends says too little: whether every layer uses the interface is seen later.
    decoder = model.get_decoder()
    decides = decoder if isinstance(decoder, PreTrainedModel) else model
    if not decides._can_set_attn_implementation() and not any(map(attends_itself, model.modules())):
        raise unsupported(architecture, "its attention does not go through transformers' AttentionInterface")


def _tell_shared_layers_their_index(model: nn.Module) -> None:
    """If several layers share an attention module (Zamba), its caller sets the layer that it attends for."""
    for module in model.modules():
        takes_index = "layer_idx" in inspect.signature(type(module).forward).parameters
        if takes_index and hasattr(module, "layer_idx") and not module._forward_pre_hooks:
            module.register_forward_pre_hook(_take_index, with_kwargs=True)


def _take_index(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("layer_idx") is not None:
        module.layer_idx = kwargs["layer_idx"]


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ())


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE parameters of a model's config: one dictionary, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
