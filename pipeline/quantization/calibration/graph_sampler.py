"""One step of a generating model, recorded on a GPU and replayed for each token: launching its small
operations one by one takes ten times as long as running them.

A recording has fixed lengths: each layer attends to the whole buffer of its keys, and a mask excludes the
places that are not yet written. Mixtures of experts, whose router makes the host wait, and layers with a
sliding window or a recurrent state are not recorded; their operations are launched one by one
(`self_calibration.py`).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ....serving_check.engine.compiling.cuda_graphs import CudaGraphs

IMPLEMENTATION = "scalegate_drawing"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
STEP = "step"


class GraphSampler:
    """Generates `count` sequences of at most `length` tokens side by side, any number of times."""

    def __init__(self, model: PreTrainedModel, count: int, length: int):
        config = model.config.get_text_config(decoder=True)
        self.model, self.count, self.layers = model, count, config.num_hidden_layers
        self.ids = torch.zeros(count, 1, dtype=torch.int64, device=model.device)
        self.chance = torch.zeros(count, 1, device=model.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.places = torch.arange(length, device=model.device)
        self.mask = torch.zeros(1, 1, 1, length, dtype=model.dtype, device=model.device)
        self.attended = 0
        self.cache = DynamicCache(config=config)
        self.cache.layers = [_FixedLayer(length, self.position) for _ in self.cache.layers]
        self.graphs: CudaGraphs[None] = CudaGraphs()

    @staticmethod
    def can_record(model: PreTrainedModel) -> bool:
        """Say whether a step of `model` does the same operations for every token."""
        config: Any = model.config.get_text_config(decoder=True)
        return (
            not model._is_stateful
            and bool(model._supports_attention_backend and model._can_set_attn_implementation())
            and not any(getattr(config, name, None) for name in EXPERTS)
            and getattr(config, "attn_logit_softcapping", None) is None
            and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
        )

    def begin(self, ids: Tensor) -> None:
        """Begin new sequences. ids: int64 [count, 1], the first token of each sequence."""
        self.ids.copy_(ids)
        self.position.zero_()

    def next(self, chance: Tensor) -> Tensor:
        """Return the next token of each sequence, int64 [count, 1]. chance: fp32 [count, 1], uniform from 0
        to 1.
        """
        self.chance.copy_(chance)
        if STEP in self.graphs:
            self.graphs.replay(STEP)
        else:
            self.step()
        return self.ids.clone()

    def record(self) -> bool:
        """Record a step, which has to be repeated after recording; return whether it could be recorded."""
        try:
            self.step()
            if self.attended != self.layers:
                return False
            self.position.zero_()
            self.graphs.capture(STEP, self.step)
        except RuntimeError:
            self.graphs = CudaGraphs()
        return STEP in self.graphs

    def step(self) -> None:
        """Compute one token, in place."""
        config: Any = self.model.config.get_text_config(decoder=True)
        before, config.drawing = self.model.config._attn_implementation, self
        self.model.set_attn_implementation(IMPLEMENTATION)
        self.attended = 0
        try:
            self.mask.copy_(torch.where(self.places <= self.position, 0.0, -torch.inf))
            positions = self.position[None].expand(self.count, 1)
            output = self.model(
                input_ids=self.ids, position_ids=positions, past_key_values=self.cache, use_cache=True
            )
            self.ids.copy_(chosen(output.logits[:, -1].float(), self.chance))
            self.position.add_(1)
        finally:
            del config.drawing
            self.model.set_attn_implementation(before)


def chosen(logits: Tensor, chance: Tensor) -> Tensor:
    """Return int64 [n, 1]: the tokens drawn from logits fp32 [n, vocab] at temperature 1, for chances [n, 1]
    from 0 to 1.
    """
    reached = logits.softmax(-1).cumsum(-1)
    aim = chance * reached[:, -1:]
    return torch.searchsorted(reached, aim, right=True).clamp(max=logits.shape[-1] - 1)


class _FixedLayer(DynamicLayer):
    """Keys and values of one layer in a buffer of fixed length: a token's keys and values are written at
    `position`, int64 [1].
    """

    def __init__(self, length: int, position: Tensor):
        super().__init__()
        self._length, self._position = length, position

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._keys, self._values = map(self._room, (key_states, value_states))
        self._keys.index_copy_(2, self._position, key_states)
        self._values.index_copy_(2, self._position, value_states)
        return self._keys, self._values

    def get_seq_length(self) -> int:
        return 0

    def _room(self, states: Tensor) -> Tensor:
        # Zeros: what is masked out must be a number.
        count, heads, _, size = states.shape
        return states.new_zeros(count, heads, self._length, size)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with query [B, H, 1, D], key and value [B, H_kv, T, D] to [B, 1, H, D_v]: heads that share keys
    count as one head's tokens."""
    drawing = cast(GraphSampler, cast(Any, module.config).drawing)
    drawing.attended += 1
    count, heads, _, size = query.shape
    together = query.reshape(count, key.shape[1], -1, size)
    mask = drawing.mask.expand(count, together.shape[1], together.shape[2], -1)
    output = scaled_dot_product_attention(together, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(count, 1, heads, -1), None


AttentionInterface.register(IMPLEMENTATION, _attention)
