"""One forward pass of an unmodified transformers model; on CUDA compiled, once for every number of tokens.

Not for choosing the tokens, nor for CUDA graphs, which capture what runs here. Compiling fuses norms, rotary
embeddings, activations and residuals; attention and packed products stay the kernels they are, as custom ops.
"""

import itertools
import warnings
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...layouts.kv_format import LayerKV, StepTokens
from .attention import AttentionLayer, PagedAttention, token_by_token

TRACED_TOKENS, TRACED_KEPT = 32, 16
"""Sizes that the forward pass is traced with: neither 1 nor equal, so that both stay free."""


class Forward:
    """The model, and the attention of the step it is computing.

    Compiled code reaches this object by its handle, an int, since a traced graph holds no Python objects. Its
    guards are dropped: a model in an engine never changes, so they could only cost time or compile again.
    """

    def __init__(self, model: PreTrainedModel, layers: dict[int, AttentionLayer], pages: dict[int, LayerKV]):
        self.model = model
        self.layers = layers
        self.pages = pages
        self.attention: PagedAttention | None = None
        self.handle = next(_HANDLES)
        _FORWARDS[self.handle] = self
        self._compiled: Any = None

    def __call__(self, tokens: Tensor, positions: Tensor, step: StepTokens, keep: Tensor) -> Tensor:
        """tokens and positions int64 [T], keep int64 [K] of the tokens whose logits are wanted → [K, V]."""
        self.attention = PagedAttention(self.layers, self.pages, step)
        run = self._logits if self._compiled is None else self._compiled
        return run(tokens[None], positions[None], keep)

    def compile(self, step: StepTokens) -> None:
        """Compile, on tokens of a step that stores nothing. A model that cannot be is left as it is."""
        device = self.model.device
        self.attention = PagedAttention(self.layers, self.pages, step)
        tokens, positions = (
            torch.zeros(1, TRACED_TOKENS, dtype=torch.int64, device=device) for _ in range(2)
        )
        keep = torch.arange(TRACED_KEPT, device=device)
        for tensor, dim in ((tokens, 1), (positions, 1), (keep, 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
        compiled = torch.compile(
            self._logits, fullgraph=True, dynamic=False, options={"guard_filter_fn": _no_guards}
        )
        try:
            compiled(tokens, positions, keep)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"{type(self.model).__name__} is served uncompiled, and slower for it: {reason}", stacklevel=2
            )
            return
        self._compiled = compiled

    def _logits(self, tokens: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            paged=_AttentionByHandle(self.handle),
        ).logits
        return logits[0]


class _AttentionByHandle:
    """What a traced forward pass's attention calls go to: the op, by the handle of its Forward."""

    def __init__(self, handle: int):
        self.handle = handle

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        output = torch.ops.scalegate.paged_attention(
            token_by_token(query),
            token_by_token(key),
            token_by_token(value),
            options.get("s_aux"),
            self.handle,
            cast(int, module.layer_idx),
        )
        return output.view(query.shape[0], query.shape[2], *output.shape[1:])


_HANDLES = itertools.count()
_FORWARDS: WeakValueDictionary[int, Forward] = WeakValueDictionary()


# Nothing is declared as mutated: what it writes are pages, which no other op of the graph sees.
@torch.library.custom_op("scalegate::paged_attention", mutates_args=())
def _paged_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, forward: int, layer: int
) -> Tensor:
    """Store key and value [T, H_kv, D], attend with query [T, H, D] → [T, H, D_v]."""
    attention = _FORWARDS[forward].attention
    if attention is None:
        raise RuntimeError("no step is under way")
    return attention.layer(layer, query, key, value, sinks)


@_paged_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, forward: int, layer: int) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _no_guards(entries: list[Any]) -> list[bool]:
    return [False] * len(entries)
