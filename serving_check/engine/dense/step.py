"""A step of a dense model on a CPU: our kernels, called one after another for each layer.

On a small model, transformers' modules around these kernels take longer than the kernels. This step calls no
module in between, and gives the same bits: `dense_step` runs both before the engine serves. Other models,
models with hooks, and long prompts on several threads go through transformers' modules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....base.log import logger
from ....kernels.norms.rms_norm_cpu import rms_norm, serves
from ....kernels.norms.rotate_heads_cpu import rotate_heads
from ....layouts.modules.linear import QuantizedLinear
from ..cpu_norms import LARGEST_ON_ONE_THREAD, CpuRMSNorm
from .parts import DenseLayer, DenseModel, dense_model

LEAST_ANGLES = 1024
"""Positions whose angles are computed at first."""
TRIED_POSITIONS = (0, 1, 2, 37, LEAST_ANGLES // 2, LEAST_ANGLES - 1)
Product = Callable[[Tensor], Tensor]


class LayerAttention(Protocol):
    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend for query [B, H, D], key and value [B, H_kv, D]; return [B, H, D]."""


@dataclass(frozen=True)
class _Layer:
    """A layer, with its products and what kernels take of its norms."""

    parts: DenseLayer
    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    attention_norm: tuple[int, float]
    mlp_norm: tuple[int, float]
    head_norms: tuple[tuple[int, float], tuple[int, float]]
    """Of queries and keys."""


class DenseStep:
    """Maps the tokens of one step to logits."""

    def __init__(self, model: DenseModel, dtype: torch.dtype):
        self._model = model
        self._rms_norm, self._rotate = rms_norm(dtype), rotate_heads(dtype)
        self._layers = [_prepared(layer) for layer in model.layers]
        self._norm = _numbers(model.norm)
        self._head = _product(model.head)
        self._like = model.norm.weight
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
        if longest > len(self._angles[0]):
            self._angles = self._angles_of(1 << (longest - 1).bit_length())
        # Without hooks, `forward` is all that a module's call does.
        hidden = self._model.embed.forward(token_ids)
        added: Tensor | None = None
        for layer in self._layers:
            normed = self._normed(hidden, added, layer.attention_norm)
            added = layer.output(self._attended(layer, normed, positions, attention))
            normed = self._normed(hidden, added, layer.mlp_norm)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            added = layer.down(layer.parts.activation.forward(gate).mul_(up))
        normed = self._normed(hidden, added, self._norm)
        return self._head(normed if logits_indices is None else normed[logits_indices])

    def _normed(self, hidden: Tensor, added: Tensor | None, norm: tuple[int, float]) -> Tensor:
        """Add to the hidden states in place, and return their norm."""
        out = torch.empty_like(hidden)
        rows, dim = hidden.shape
        added_at = 0 if added is None else added.data_ptr()
        self._rms_norm(hidden.data_ptr(), added_at, norm[0], out.data_ptr(), rows, dim, norm[1])
        return out

    def _attended(
        self, layer: _Layer, normed: Tensor, positions: Tensor, attention: LayerAttention
    ) -> Tensor:
        """Return what attention gives for the rows, [B, H * D]."""
        parts, qkv, rows = layer.parts, layer.qkv(normed), normed.shape[0]
        q_heads, kv_heads, dim = parts.q_heads, parts.kv_heads, parts.head_dim
        (q_weight, q_eps), (k_weight, k_eps) = layer.head_norms
        cos, sin = self._angles
        self._rotate(
            *(qkv.data_ptr(), qkv.shape[1], rows, q_heads, kv_heads, dim, q_weight, k_weight),
            *(cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), q_eps, k_eps),
        )
        heads = qkv.view(rows, -1, dim)
        query, key, value = heads.split_with_sizes((q_heads, kv_heads, kv_heads), dim=1)
        return attention.layer(parts.index, query, key, value, None).reshape(rows, -1)

    def _angles_of(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for positions below `count`, [count, D] each, as the model computes
        them.
        """
        cos, sin = self._model.rotary(self._like, torch.arange(count)[None])
        return cos[0].contiguous(), sin[0].contiguous()


def dense_step(model: PreTrainedModel, run: Callable[[Tensor, Tensor, Any], Tensor]) -> DenseStep | None:
    """Return the step of a model; None if the model has other parts, or gives other bits.

    run: the model's own decode step: maps token_ids [B], positions [B] and what attends to logits [B, V]
    """
    found = dense_model(model)
    if found is None or found.is_hooked or not all(_is_served(layer, model.dtype) for layer in found.layers):
        return None
    positions = torch.tensor(TRIED_POSITIONS)
    token_ids = (positions * 7 + 1) % found.embed.weight.shape[0]  # type: ignore[index, operator]
    with torch.inference_mode():
        step = DenseStep(found, model.dtype)
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


def _prepared(layer: DenseLayer) -> _Layer:
    return _Layer(
        layer,
        _product(layer.qkv),
        _product(layer.output),
        _product(layer.gate_up),
        _product(layer.down),
        _numbers(layer.attention_norm),
        _numbers(layer.mlp_norm),
        (_numbers(layer.q_norm), _numbers(layer.k_norm)),
    )


def _numbers(norm: CpuRMSNorm | None) -> tuple[int, float]:
    """Return the address of the weight, 0 without a norm, and what is added to the mean."""
    return (0, 0.0) if norm is None else (norm.contiguous_weight.data_ptr(), norm.eps)


def _product(module: nn.Module) -> Product:
    """Return the product of x [T, K] as a contiguous [T, N]."""
    product = module.product_of_rows() if isinstance(module, QuantizedLinear) else None
    return product or (lambda x: module(x).contiguous())
