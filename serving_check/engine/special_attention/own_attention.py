"""Attention that models compute themselves, not by transformers' AttentionInterface, over our pages.

Their classes are older than that interface. Some have a method that attends, `_attn`, which is replaced. The
others get another forward. Several add ALiBi (arXiv 2108.12409), a bias that grows with a key's position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Attend = Callable[..., Tensor]
"""Attends for a module, query [B, H, T, D], key and value [B, H_kv, T, D], and the options of
AttentionInterface; returns [B, T, H, D_v]."""

EXACT = 256
"""Integers below this, and its multiples below its square, are exact in bf16."""


@dataclass(frozen=True, eq=False)
class Alibi:
    """ALiBi as two more dimensions: keys hold their position there, and queries the slope of their head."""

    slopes: Tensor
    """fp32 [H]: what is added to a score for each token that the key is further on."""

    @staticmethod
    def of(bias: Tensor) -> "Alibi":
        """bias: what the model adds to scores, [H, ..., keys], of which the last two keys are neighbours."""
        by_key = bias.float().flatten(1)
        return Alibi(by_key[:, -1] - by_key[:, -2])

    def appended(self, query: Tensor, key: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Extend query [T, H, D] and key [T, H_kv, D] at positions int64 [T]. scale: by which scores are
        multiplied."""
        low = positions % EXACT
        parts = torch.stack((positions - low, low), 1).to(key.dtype)
        slopes = (self.slopes / scale).to(query.dtype)
        return (
            torch.cat((query, slopes[:, None].expand(*query.shape[:2], 2)), 2),
            torch.cat((key, parts[:, None].expand(-1, key.shape[1], -1)), 2),
        )


NEEDS_A_MASK = "MptModel"
"""The class that converts its mask, and so takes no None for it."""


def attends_itself(module: nn.Module) -> bool:
    """Say whether the module's attention is of a known kind that does not use AttentionInterface."""
    name = type(module).__name__
    return name in SCALES or name in FORWARDS


def route_attention(model: nn.Module, attend: Attend) -> None:
    """Make every such module of the model call `attend`."""
    for module in model.modules():
        name = type(module).__name__
        if hasattr(module, "layer_id") and attends_itself(module):
            module.layer_idx = module.layer_id
        if name in SCALES:
            module._attn = MethodType(partial(_attn, attend), module)  # type: ignore[assignment]
        elif name in FORWARDS:
            module.forward = MethodType(partial(FORWARDS[name], attend), module)  # type: ignore[method-assign]


def _attn(attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    """Replace a module's `_attn`, which returns [B, H, T, D] and the weights."""
    is_local = getattr(module, "attention_type", None) == "local"
    window = module.config.window_size if is_local else None
    scale = SCALES[type(module).__name__](module)
    return attend(module, query, key, value, scaling=scale, sliding_window=window).transpose(1, 2), None


SCALES: dict[str, Callable[[Any], float]] = {
    "CodeGenAttention": lambda module: 1.0 / module.scale_attn,
    "GPTJAttention": lambda module: 1.0 / module.scale_attn,
    "GPTNeoSelfAttention": lambda module: 1.0,
    "GPTNeoXJapaneseAttention": lambda module: 1.0 / module.norm_factor,
}
"""The factor of scores for each class of transformers that attends in a method `_attn`."""


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """Reshape [B, T, H * D] to [B, H, T, D]."""
    return tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2)


def _falcon(
    attend: Attend,
    module: Any,
    hidden: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    fused = module.query_key_value(hidden)
    if module.new_decoder_architecture:
        # transformers repeats each key head for all its queries; here it is stored once.
        groups = fused.view(*fused.shape[:2], module.num_kv_heads, -1, module.head_dim)
        heads = groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]
    else:
        heads = module._split_heads(fused)
    query, key, value = (part.transpose(1, 2) for part in heads)
    if position_embeddings is not None and alibi is None:
        query, key = _rotate(query, *position_embeddings), _rotate(key, *position_embeddings)
    bias = None if alibi is None else alibi.reshape(module.num_heads, -1) * module.inv_norm_factor
    output = attend(module, query, key, value, scaling=module.inv_norm_factor, alibi=bias)
    return module.dense(output.flatten(2)), None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, 3)
    return x * cosine[:, None] + torch.cat((-second, first), 3) * sine[:, None]


def _bloom(
    attend: Attend, module: Any, hidden: Tensor, residual: Tensor, alibi: Tensor, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden))
    output = attend(module, query, key, value, scaling=module.inv_norm_factor, alibi=alibi)
    return module.dense(output.flatten(2)) + residual, None


def _xglm(attend: Attend, module: Any, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    projected = module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)
    query, key, value = (_by_head(part, module.num_heads) for part in projected)
    output = attend(module, query, key, value, scaling=module.scaling)
    return module.out_proj(output.flatten(2)), None


def _mpt(attend: Attend, module: Any, hidden: Tensor, position_bias: Tensor, **_: Any) -> tuple[Tensor, None]:
    fused = module.Wqkv(hidden)
    if module.clip_qkv:
        fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (_by_head(part, module.n_heads) for part in fused.chunk(3, 2))
    output = attend(module, query, key, value, scaling=module.softmax_scale, alibi=position_bias)
    return module.out_proj(output.flatten(2)), None


FORWARDS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
    "XGLMAttention": _xglm,
}
"""The forward for each class of transformers that attends within its forward."""
