"""The forward pass of an unmodified transformers model over paged keys and values; compiled on a GPU.

Drawing tokens and CUDA graphs, which capture this pass, are elsewhere. Compiling fuses norms, rotary
embeddings, activations and residuals; attention and packed products keep their own kernels, as custom ops.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, library, nn
from transformers import PreTrainedModel

from ...base.batch_invariance import BatchInvariance
from ...layouts.kv.attention_metadata import AttentionMetadata
from ...layouts.kv.layer import LayerKV
from ...layouts.states.slots import StateSlots
from ...layouts.states.state_format import StateKey
from .attention import (
    LAYER_INDEX,
    Attention,
    AttentionLayer,
    PagedAttention,
    taking_calls,
    token_by_token,
)
from .compiling.compiled_layers import ONE_TUNING, TUNINGS, CompiledLayers, model_layers
from .compiling.cross_layer_fusion import fuse_across_layers
from .special_attention.long_rope import long_requests
from .special_attention.sparse_attention import unread_mask
from .state_layers import StepStates, taking_states


class Forward:
    """The model, and the storage of its attention layers by their index.

    as_op: attention is a custom op, which compiled layers can contain; every step is one row of tokens,
           [1, T]. Otherwise each layer's storage is called directly, and a decode step is a column, [B, 1]
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[int, AttentionLayer],
        storage: Mapping[int, LayerKV],
        as_op: bool,
        batch_invariance: BatchInvariance = "tuned",
        states: Mapping[StateKey, StateSlots] | None = None,
    ):
        """batch_invariance: the mode for which layers are compiled. states: the slots of layers that keep a
        state"""
        self.model = model
        self.layers = layers
        self.storage = storage
        self.as_op = as_op
        self._mask = unread_mask(model, model.device)
        self.states = states or {}
        self._batch_invariance = batch_invariance
        self._tunings = TUNINGS if batch_invariance == "tuned" else ONE_TUNING

    def __call__(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | None,
        is_long: bool = False,
    ) -> Tensor:
        """Map token_ids int64 [T] to logits [L, V] of the tokens logits_indices, int64 [L]; None for all T.

        is_long: whether the requests are longer than the original context of a model with LongRoPE
        """
        step = PagedAttention(self.layers, self.storage, metadata)
        if self.as_op:
            return self._run_with_op(token_ids, metadata.positions, step, logits_indices)
        is_column = logits_indices is None
        with taking_states(StepStates(self.states, metadata)), long_requests(is_long):
            logits = self._run(token_ids, metadata.positions, step, logits_indices, int(is_column))
        return logits.flatten(0, 1)

    def compile(self) -> None:
        """Compile the layers."""
        chain = fuse_across_layers(model_layers(self.model), lambda: self._trace(TUNINGS[0].traced_tokens))
        for tuning in self._tunings:
            with CompiledLayers(self.model, chain, tuning, self._batch_invariance):
                self._trace(tuning.traced_tokens)

    def _trace(self, count: int) -> None:
        zeros = torch.zeros(count, dtype=torch.int64, device=self.model.device)
        self._run_with_op(zeros, zeros, _NoStorage(), zeros[:1])

    def _run_with_op(
        self,
        token_ids: Tensor,
        positions: Tensor,
        step: "PagedAttention | _NoStorage",
        logits_indices: Tensor | None,
    ) -> Tensor:
        token = _STEP.set(step)
        try:
            return self._run(token_ids, positions, _ATTENTION_AS_OP, logits_indices, 0)[0]
        finally:
            _STEP.reset(token)

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        logits_indices: Tensor | None,
        dim: int,
    ) -> Tensor:
        with taking_calls(attention):
            return self.model(
                input_ids=token_ids.unsqueeze(dim),
                position_ids=positions.unsqueeze(dim),
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=0 if logits_indices is None else logits_indices,
                paged=attention,
            ).logits


class _NoStorage:
    """Stands for attention while layers are traced: stores nothing and returns zeros."""

    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


_STEP: ContextVar[PagedAttention | _NoStorage] = ContextVar("the step that a forward pass is computing")


class _AttentionAsOp:
    """Takes attention calls and passes them to a custom op, which compiled code can contain.

    Layers that are alike share one compilation, even across engines. The op therefore finds the current step
    through a context variable, and the layer's index is a tensor in host memory: compiled code treats that
    tensor as an input, not as a constant.
    """

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        output = torch.ops.scalegate.paged_attention(
            getattr(module, LAYER_INDEX),
            token_by_token(query),
            token_by_token(key),
            token_by_token(value),
            options.get("s_aux"),
        )
        return output.view(query.shape[0], query.shape[2], *output.shape[1:])


_ATTENTION_AS_OP = _AttentionAsOp()


# Nothing is declared as mutated: it writes to pages, which no other op of a compiled layer uses.
@library.custom_op("scalegate::paged_attention", mutates_args=())
def _paged_attention(
    layer_index: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    """Store key [T, H_kv, D] and value [T, H_kv, D_v], and attend with query [T, H, D] to [T, H, D_v].

    layer_index: int64 [] in host memory, so that reading it waits for no device
    """
    return _STEP.get().layer(int(layer_index), query, key, value, sinks).contiguous()


@_paged_attention.register_fake
def _(layer_index: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])
