"""The parts of a dense transformer whose steps need no transformers' modules: norms, products, rotary.

A model is recognized by the names of its modules, which Llama, Qwen2, Qwen3, Mistral and many others share.
Names do not say what a module computes: `step.py` compares results before it serves any.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from ....layouts.modules.merged_linear import MergedLinear
from ..cpu_norms import CpuRMSNorm

BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
QKV = ("q_proj", "k_proj", "v_proj")
ATTENTION = {*QKV, "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose angles depend on the position alone."""


@dataclass(frozen=True)
class DenseLayer:
    """One layer. `q_norm` and `k_norm` are None if heads have no norms."""

    index: int
    """By which attention knows the layer."""
    attention_norm: CpuRMSNorm
    qkv: nn.Module
    q_heads: int
    kv_heads: int
    head_dim: int
    q_norm: CpuRMSNorm | None
    k_norm: CpuRMSNorm | None
    output: nn.Module
    mlp_norm: CpuRMSNorm
    gate_up: nn.Module
    activation: nn.Module
    down: nn.Module


@dataclass(frozen=True)
class DenseModel:
    vocab_size: int
    """Tokens are below it."""
    embed: nn.Module
    layers: list[DenseLayer]
    norm: CpuRMSNorm
    head: nn.Module
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    hooks: tuple[Mapping[int, Any], ...]
    """The hooks of all modules, which a step without these modules would not call."""

    @property
    def is_hooked(self) -> bool:
        return any(self.hooks)


def dense_model(model: PreTrainedModel) -> DenseModel | None:
    """Return the parts of a model; None if it has others."""
    body, head = getattr(model, model.base_model_prefix, None), model.get_output_embeddings()
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Module) or _names(body) != BODY:
        return None
    rotary, norm = body.get_submodule("rotary_emb"), body.get_submodule("norm")
    if getattr(rotary, "rope_type", None) not in ROPE_TYPES or not isinstance(norm, CpuRMSNorm):
        return None
    layers = [_layer(layer) for layer in body.get_submodule("layers").children()]
    found = [layer for layer in layers if layer is not None]
    if not found or len(found) < len(layers):
        return None
    hooks = [(each._forward_hooks, each._forward_pre_hooks) for each in model.modules()]
    all_hooks = tuple(mapping for pair in hooks for mapping in pair)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return DenseModel(vocab_size, body.get_submodule("embed_tokens"), found, norm, head, rotary, all_hooks)


def _layer(layer: nn.Module) -> DenseLayer | None:
    if _names(layer) != LAYER:
        return None
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    if _names(attention) - HEAD_NORMS != ATTENTION or _names(mlp) != MLP:
        return None
    qkv = _merged(attention, *QKV)
    gate_up = _merged(mlp, "gate_proj", "up_proj")
    norms = [layer.get_submodule(name) for name in ("input_layernorm", "post_attention_layernorm")]
    attention_norm, mlp_norm = norms
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    head_dim = getattr(attention, "head_dim", None)
    if qkv is None or gate_up is None or not isinstance(head_dim, int):
        return None
    if not isinstance(attention_norm, CpuRMSNorm) or not isinstance(mlp_norm, CpuRMSNorm):
        return None
    q_rows, kv_rows, v_rows = (getattr(attention, name).out_features for name in QKV)
    if v_rows != kv_rows or not all(_norms_heads(norm, head_dim) for norm in (q_norm, k_norm)):
        return None
    return DenseLayer(
        cast(int, attention.layer_idx),
        attention_norm,
        qkv,
        q_rows // head_dim,
        kv_rows // head_dim,
        head_dim,
        q_norm,
        k_norm,
        attention.get_submodule("o_proj"),
        mlp_norm,
        gate_up,
        mlp.get_submodule("act_fn"),
        mlp.get_submodule("down_proj"),
    )


def _norms_heads(norm: object, head_dim: int) -> bool:
    return norm is None or (isinstance(norm, CpuRMSNorm) and len(norm.weight) == head_dim)


def _merged(parent: nn.Module, *names: str) -> nn.Module | None:
    """Return the merged layer whose rows are those of the named ones in this order; None without one."""
    parts = [getattr(parent, name) for name in names]
    if not all(isinstance(part, MergedLinear) for part in parts):
        return None
    stops = [part.rows.stop for part in parts]
    starts = [part.rows.start for part in parts]
    merged = parts[0].merged
    follow = starts == [0, *stops[:-1]] and stops[-1] == merged.out_features
    return merged if follow and all(part.merged is merged for part in parts) else None


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
