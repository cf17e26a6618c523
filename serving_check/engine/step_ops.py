"""Attention and states as custom ops, which compiled layers and CUDA graphs can contain.

Layers that are alike share one compilation, even across engines. The ops therefore find the current step
through a context variable, and a layer's index is a tensor in host memory: compiled code treats that tensor
as an input, not as a constant.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, library, nn, ops

from ...layouts.states.all_states import STATE_FORMATS
from ...layouts.states.state_format import StateInputs, StateKey
from .attention import LAYER_INDEX, token_by_token


class _StatesByKey(Protocol):
    def by_key(self, key: StateKey, inputs: StateInputs, like: Tensor) -> Tensor:
        """Return outputs [T, ...] of a step's T tokens, with the shape and dtype of `like`."""


class _AttentionByIndex(Protocol):
    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend for query [T, H, D], key [T, H_kv, D], value [T, H_kv, D_v]; return [T, H, D_v]."""


@dataclass(frozen=True)
class Step:
    """What the ops of one forward pass read and write."""

    attention: _AttentionByIndex
    states: _StatesByKey


class _NoStorage:
    """Stands for attention and states while layers are traced: stores nothing and returns zeros."""

    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    def by_key(self, key: StateKey, inputs: StateInputs, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape)


NO_STORAGE = Step(_NoStorage(), _NoStorage())
_STEP: ContextVar[Step] = ContextVar("the step that a forward pass is computing")


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Let the ops read and write `step` inside the `with` block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


class _AttentionAsOp:
    """Takes attention calls and passes them to a custom op."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        output = ops.scalegate.paged_attention(
            getattr(module, LAYER_INDEX),
            token_by_token(query),
            token_by_token(key),
            token_by_token(value),
            options.get("s_aux"),
        )
        return output.view(query.shape[0], query.shape[2], *output.shape[1:])


ATTENTION_AS_OP = _AttentionAsOp()


# Nothing is declared as mutated: it writes to pages, which no other op of a compiled layer uses.
@library.custom_op("scalegate::paged_attention", mutates_args=())
def _paged_attention(
    layer_index: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    """Store key [T, H_kv, D] and value [T, H_kv, D_v], and attend with query [T, H, D] to [T, H, D_v].

    layer_index: int64 [] in host memory, so that reading it waits for no device
    """
    return _STEP.get().attention.layer(int(layer_index), query, key, value, sinks).contiguous()


@_paged_attention.register_fake
def _(layer_index: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


# Nothing is declared as mutated here either: slots belong to one call a step.
@library.custom_op("scalegate::layer_state", mutates_args=())
def _layer_state(
    layer_index: Tensor,
    name: str,
    index: int,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    like: Tensor,
) -> Tensor:
    """Compute outputs [T, ...], with the shape and dtype of `like`, from a state's inputs of T tokens.

    layer_index: int64 [] in host memory. name, index: of the state, as in StateKey. tensors, numbers: what
    `StateInputs.tensors_and_numbers` returns
    """
    inputs = STATE_FORMATS[name].inputs.of(tensors, numbers)
    return _STEP.get().states.by_key(StateKey(int(layer_index), name, index), inputs, like)


@_layer_state.register_fake
def _(
    layer_index: Tensor,
    name: str,
    index: int,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    like: Tensor,
) -> Tensor:
    return like.new_empty(like.shape)
