"""One forward pass of an unmodified transformers model; on CUDA its layers are compiled, for any batch size.

Not for choosing the tokens, nor for CUDA graphs, which capture what runs here. Compiling fuses norms, rotary
embeddings, activations and residuals; attention and packed products stay the kernels they are, as custom ops.
"""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, library, nn
from transformers import PreTrainedModel

from ...layouts.kv_format import LayerKV, StepTokens
from .attention import AttentionLayer, PagedAttention, token_by_token
from .compiled_layers import TUNINGS, CompiledLayers, model_layers
from .cross_layer_fusion import fuse_across_layers


class Forward:
    """The model, and the pages that its attention layers write to."""

    def __init__(self, model: PreTrainedModel, layers: dict[int, AttentionLayer], pages: dict[int, LayerKV]):
        self.model = model
        self.layers = layers
        self.pages = pages

    def __call__(self, tokens: Tensor, positions: Tensor, step: StepTokens, keep: Tensor | None) -> Tensor:
        """tokens and positions int64 [T] → logits [K, V] of the tokens keep, int64 [K]; None keeps all."""
        return self._run(tokens, positions, _Step(PagedAttention(self.layers, self.pages, step)), keep)

    def compile(self) -> None:
        """Compile the layers."""
        chain = fuse_across_layers(model_layers(self.model), lambda: self._trace(TUNINGS[0].traced_tokens))
        for tuning in TUNINGS:
            with CompiledLayers(self.model, chain, tuning):
                self._trace(tuning.traced_tokens)

    def _trace(self, count: int) -> None:
        zeros = torch.zeros(count, dtype=torch.int64, device=self.model.device)
        self._run(zeros, zeros, _NoStep(), zeros[:1])

    def _run(self, tokens: Tensor, positions: Tensor, step: "_Step | _NoStep", keep: Tensor | None) -> Tensor:
        under_way = _UNDER_WAY.set(step)
        try:
            return self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
                paged=_ATTENTION_AS_OP,
            ).logits[0]
        finally:
            _UNDER_WAY.reset(under_way)


class _Step:
    """The attention of the step under way, asked for layer after layer."""

    def __init__(self, attention: PagedAttention):
        self.attention = attention
        self._next = iter(attention.layers)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return self.attention.layer(next(self._next), query, key, value, sinks)


class _NoStep:
    """Attention while layers are traced: nothing is stored, nothing attended to."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


_UNDER_WAY: ContextVar[_Step | _NoStep] = ContextVar("the step that a forward pass is computing")


class _AttentionAsOp:
    """What attention calls go to: an op, which compiled code can hold.

    It names neither engine nor layer: layers that are alike share one compilation, and so do engines.
    """

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        output = torch.ops.scalegate.paged_attention(
            token_by_token(query), token_by_token(key), token_by_token(value), options.get("s_aux")
        )
        return output.view(query.shape[0], query.shape[2], *output.shape[1:])


_ATTENTION_AS_OP = _AttentionAsOp()


# Nothing is declared as mutated: what it writes are pages, which no other op of a compiled layer sees.
@library.custom_op("scalegate::paged_attention", mutates_args=())
def _paged_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    """Store key [T, H_kv, D] and value [T, H_kv, D_v], attend with query [T, H, D] → [T, H, D_v]."""
    return _UNDER_WAY.get().attend(query, key, value, sinks).contiguous()


@_paged_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])
