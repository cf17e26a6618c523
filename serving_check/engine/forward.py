"""The forward pass of an unmodified transformers model over paged keys and values; compiled on a GPU.

Drawing tokens and CUDA graphs, which capture this pass, are elsewhere. Compiling fuses norms, rotary
embeddings, activations and residuals; attention and packed products keep their own kernels, as custom ops.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...base.batch_invariance import BatchInvariance
from ...layouts.kv.attention_metadata import AttentionMetadata
from ...layouts.kv.layer import LayerKV
from ...layouts.states.state_format import StateKey, StateSlots
from .attention import Attention, AttentionLayer, PagedAttention, taking_calls
from .compiling.compiled_layers import ONE_TUNING, TUNINGS, CompiledLayers, model_layers
from .compiling.cross_layer_fusion import fuse_across_layers
from .special_attention.long_rope import LongRequests, long_tokens
from .special_attention.sparse_attention import unread_mask
from .state_layers import STATES_AS_OP, States, StepStates, taking_states
from .step_ops import ATTENTION_AS_OP, NO_STORAGE, Step, running

if TYPE_CHECKING:
    from .dense.step import DenseStep


class Forward:
    """The model, and the storage of its attention layers by their index.

    as_op: attention and states are custom ops, which compiled layers can contain; every step is one row of
           tokens, [1, T]. Otherwise each layer's storage is called directly, and a decode step is a column,
           [B, 1]
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[int, AttentionLayer],
        storage: Mapping[int, LayerKV],
        as_op: bool,
        batch_invariance: BatchInvariance = "tuned",
        states: Mapping[StateKey, StateSlots] | None = None,
        long_requests: LongRequests | None = None,
    ):
        """batch_invariance: the mode for which layers are compiled. states: the slots of layers that keep a
        state. long_requests: which requests are long, if the model has LongRoPE and contexts beyond its own
        """
        self.model = model
        self.layers = layers
        self.storage = storage
        self.as_op = as_op
        self._mask = unread_mask(model, model.device)
        self.states = states or {}
        self._dense: DenseStep | None = None
        self.long_requests = long_requests
        self._batch_invariance = batch_invariance
        self._tunings = TUNINGS if batch_invariance == "tuned" else ONE_TUNING

    def __call__(
        self, token_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor | None
    ) -> Tensor:
        """Map token_ids int64 [T] to logits [L, V] of the tokens logits_indices, int64 [L], or of all."""
        if self.long_requests is None:
            return self._compute(token_ids, metadata, logits_indices)
        with long_tokens(self.long_requests.of(metadata.token_rows)):
            return self._compute(token_ids, metadata, logits_indices)

    def _compute(
        self, token_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor | None
    ) -> Tensor:
        dense, host = self._dense, metadata.host
        if dense is not None and host is not None and dense.takes(len(token_ids)):
            longest = max(host.seq_lens.tolist())
            if dense.decodes and host.num_decodes == len(token_ids):
                return dense.decode(token_ids, metadata, longest)
            attention = PagedAttention(self.layers, self.storage, metadata)
            return dense(token_ids, metadata.positions, longest, attention, logits_indices)
        attention = PagedAttention(self.layers, self.storage, metadata)
        states = StepStates(self.states, metadata)
        if self.as_op:
            return self._run_with_ops(token_ids, metadata.positions, Step(attention, states), logits_indices)
        is_column = logits_indices is None
        logits = self._run(token_ids, metadata.positions, attention, states, logits_indices, int(is_column))
        return logits.flatten(0, 1)

    def compile(self) -> None:
        """Compile the layers."""
        chain = fuse_across_layers(model_layers(self.model), lambda: self._trace(TUNINGS[0].traced_tokens))
        for tuning in self._tunings:
            with CompiledLayers(self.model, chain, tuning, self._batch_invariance):
                self._trace(tuning.traced_tokens)

    def run_without_modules(self) -> None:
        """Run steps without transformers' modules if the model is dense and the bits stay the same."""
        # Imported only here: it imports numba, which takes half a second.
        from .dense.step import dense_step

        if not self.states and self.long_requests is None:
            options = {index: layer.options for index, layer in self.layers.items() if layer.only_attends}
            self._dense = dense_step(self.model, self._column, options, self.storage)

    def _column(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run a decode step of a model without states."""
        return self._run(token_ids, positions, attention, STATES_AS_OP, None, 1).flatten(0, 1)

    def _trace(self, count: int) -> None:
        zeros = torch.zeros(count, dtype=torch.int64, device=self.model.device)
        self._run_with_ops(zeros, zeros, NO_STORAGE, zeros[:1])

    def _run_with_ops(
        self, token_ids: Tensor, positions: Tensor, step: Step, logits_indices: Tensor | None
    ) -> Tensor:
        with running(step):
            return self._run(token_ids, positions, ATTENTION_AS_OP, STATES_AS_OP, logits_indices, 0)[0]

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        states: States,
        logits_indices: Tensor | None,
        dim: int,
    ) -> Tensor:
        with taking_calls(attention), taking_states(states):
            return self.model(
                input_ids=token_ids.unsqueeze(dim),
                position_ids=positions.unsqueeze(dim),
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=0 if logits_indices is None else logits_indices,
                paged=attention,
            ).logits
