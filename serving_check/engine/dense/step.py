"""A step of a dense model on a CPU: our kernels, called one after another for each layer.

On a small model, transformers' modules around these kernels take longer than the kernels. This step calls no
module in between, and gives the same bits: `dense_step` runs both before the engine serves. Other models,
models with hooks, and long prompts on several threads go through transformers' modules.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....base.log import logger
from ....kernels.attention.options import AttentionOptions
from ....kernels.cpu.calls import StepNumber
from ....kernels.cpu.openmp import gomp_parallel
from ....kernels.norms.rms_norm_cpu import serves
from ....layouts.kv.attention_metadata import AttentionMetadata
from ....layouts.kv.layer import LayerKV
from ..cpu_norms import LARGEST_ON_ONE_THREAD
from .parts import DenseLayer, DenseModel, dense_model
from .program import Held, LayerAttention, Program, held_sizes

LEAST_ANGLES = 1024
"""Positions whose angles are computed at first."""
TOKENS, THREADS, POSITIONS, TABLE, TABLE_STRIDE, LENGTHS = map(
    int,
    (
        StepNumber.TOKENS,
        StepNumber.THREADS,
        StepNumber.POSITIONS,
        StepNumber.TABLE,
        StepNumber.TABLE_STRIDE,
        StepNumber.LENGTHS,
    ),
)
TRIED_POSITIONS = (0, 1, 2, 37, LEAST_ANGLES // 2, LEAST_ANGLES - 1)
MOST_ROWS_KEPT = 64
"""Rows whose memory is kept for the next step: decoding takes the same memory again and again."""


class DenseStep:
    """Maps the tokens of one step to logits."""

    def __init__(
        self,
        model: DenseModel,
        dtype: torch.dtype,
        options: Mapping[int, AttentionOptions],
        storage: Mapping[int, LayerKV],
    ):
        """options, storage: of attention, by the layer's index. There are no options for a layer that changes
        queries or keys before it attends.
        """
        self._model = model
        self._like = model.norm.weight
        self._numbers = np.zeros(len(StepNumber) + len(Held), np.int64)
        self._numbers[StepNumber.PARALLEL] = gomp_parallel()
        self._program = Program(model, dtype, self._numbers, options, storage)
        self._sizes = held_sizes(model)
        self._rows = 0
        self._held: dict[Held, Tensor] = {}
        self._angles = self._angles_of(LEAST_ANGLES)

    @property
    def takes_angles(self) -> bool:
        """Say whether the model's angles are what the kernel reads."""
        dims = {layer.head_dim for layer in self._model.layers}
        return all(each.dtype is self._like.dtype and {each.shape[1]} == dims for each in self._angles)

    def takes(self, tokens: int) -> bool:
        """Say whether a step of so many tokens is computed here: not if a module has a hook, which this step
        would not call, nor if torch's threads are faster than the kernels' one.
        """
        is_long = tokens * self._like.shape[0] > LARGEST_ON_ONE_THREAD and torch.get_num_threads() > 1
        return not is_long and not self._model.is_hooked

    @property
    def decodes(self) -> bool:
        """Say whether `decode` serves this model's layers and pages."""
        return self._program.decodes

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        longest: int,
        attention: LayerAttention,
        logits_indices: Tensor | None = None,
    ) -> Tensor:
        """Map token_ids int64 [T] at positions int64 [T], all below `longest`, to logits [L, V] of the tokens
        logits_indices, int64 [L], or of all.
        """
        self._begin(token_ids, positions, longest)
        self._program.run(self._held, attention)
        return self._logits(logits_indices)

    def decode(self, token_ids: Tensor, metadata: AttentionMetadata, longest: int) -> Tensor:
        """Do the same for a step in which every token is that of a decoding request."""
        self._begin(token_ids, metadata.positions, longest)
        numbers, table = self._numbers, metadata.block_table
        numbers[TABLE], numbers[TABLE_STRIDE] = table.data_ptr(), table.stride(0)
        numbers[LENGTHS] = metadata.seq_lens.data_ptr()
        self._program.decode(self._held)
        return self._logits(None)

    def _begin(self, token_ids: Tensor, positions: Tensor, longest: int) -> None:
        if longest > len(self._angles[0]):
            self._angles = self._angles_of(1 << (longest - 1).bit_length())
        if len(token_ids) != self._rows:
            self._take_memory(len(token_ids))
        numbers = self._numbers
        numbers[TOKENS], numbers[THREADS] = token_ids.data_ptr(), torch.get_num_threads()
        numbers[POSITIONS] = positions.data_ptr()
        self._program.embed(self._held, token_ids)

    def _logits(self, logits_indices: Tensor | None) -> Tensor:
        normed = self._held[Held.NORMED]
        if self._rows > MOST_ROWS_KEPT:
            self._rows, self._held = 0, {}
        return self._program.head(normed if logits_indices is None else normed[logits_indices])

    def _take_memory(self, rows: int) -> None:
        self._rows, self._numbers[StepNumber.ROWS] = rows, rows
        self._held = {name: self._like.new_empty(rows, size) for name, size in self._sizes.items()}
        for name, tensor in self._held.items():
            self._numbers[name] = tensor.data_ptr()

    def _angles_of(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for positions below `count`, [count, D] each, as the model computes
        them.
        """
        cos, sin = self._model.rotary(self._like, torch.arange(count)[None])
        cos, sin = cos[0].contiguous(), sin[0].contiguous()
        self._numbers[StepNumber.COS], self._numbers[StepNumber.SIN] = cos.data_ptr(), sin.data_ptr()
        return cos, sin


def dense_step(
    model: PreTrainedModel,
    run: Callable[[Tensor, Tensor, Any], Tensor],
    options: Mapping[int, AttentionOptions],
    storage: Mapping[int, LayerKV],
) -> DenseStep | None:
    """Return the step of a model; None if the model has other parts, or gives other bits.

    run: the model's own decode step: maps token_ids [B], positions [B] and what attends to logits [B, V]
    options, storage: as those of `DenseStep`
    """
    found = dense_model(model)
    if found is None or found.is_hooked or not all(_is_served(layer, model.dtype) for layer in found.layers):
        return None
    positions = torch.tensor(TRIED_POSITIONS)
    token_ids = (positions * 7 + 1) % found.embed.weight.shape[0]  # type: ignore[index, operator]
    with torch.inference_mode():
        step = DenseStep(found, model.dtype, options, storage)
        if not step.takes_angles:
            return None
        expected = run(token_ids, positions, MixedHeads())
        logits = step(token_ids, positions, LEAST_ANGLES, MixedHeads())
    if not torch.equal(logits, expected):
        logger.debug(f"{type(model).__name__} runs its own modules: other bits without them")
        return None
    return step


class MixedHeads:
    """In place of attention while both steps are compared: each output depends on the layer and on every
    query, key and value of its token.
    """

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        index: Any = module.layer_idx
        return self.layer(index, query, key, value, options.get("s_aux")).unsqueeze(1)

    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        if sinks is not None:
            return torch.full_like(query, torch.nan)
        group = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1) for each in (key, value))
        return (query * (0.5 + index) - keys).contiguous() + values


def _is_served(layer: DenseLayer, dtype: torch.dtype) -> bool:
    norms = [layer.attention_norm, layer.mlp_norm, *filter(None, (layer.q_norm, layer.k_norm))]
    return serves(dtype, layer.head_dim) and all(norm.weight.dtype is dtype for norm in norms)
