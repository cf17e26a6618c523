"""Mixture-of-experts layers whose experts are packed: the transformers module with its two products replaced.

Gating, biases and norms stay the architecture's own. One product for each expert that is hit, which is
correct everywhere and fast nowhere; a grouped kernel belongs behind the same class.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...layouts.errors import UserError
from ...layouts.int4 import Int4Weight
from ...layouts.layout import QuantizedWeight
from ...layouts.linear import QuantizedLinear
from ...layouts.nvfp4 import NVFP4Weight


class QuantizedExperts(nn.Module):
    """Stands where a transformers experts module stood, and keeps it for everything but the products."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        missing = [name for name in ("has_gate", "has_bias", "is_transposed") if not hasattr(experts, name)]
        if missing:
            raise UserError(
                f"quantized experts of {type(experts).__name__} are not supported: it does not follow "
                f"transformers' experts interface"
            )
        self.experts = experts

    def set_packed(self, name: str, packed: Sequence[Sequence[QuantizedLinear]]) -> None:
        """Replace the 3-D parameter `name`: for each expert, the linears whose outputs stand side by side."""
        delattr(self.experts, name)
        setattr(self.experts, name, nn.ModuleList(nn.ModuleList(parts) for parts in packed))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index int [T, top_k], top_k_weights [T, top_k] to [T, H]."""
        experts: Any = self.experts
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        activate = experts._apply_gate if experts.has_gate else experts.act_fn
        per_choice = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
        for expert in torch.unique(top_k_index).tolist():
            token, choice = torch.where(top_k_index == expert)
            x = activate(self._project(first, expert, hidden_states[token]))
            x = self._project("down_proj", expert, x)
            if getattr(experts, "has_post_expert_norm", False):
                x = experts.post_expert_norm(x)
            per_choice[token, choice] = (x * top_k_weights[token, choice, None]).to(per_choice.dtype)
        # Summed choice by choice, not scattered: the order of the additions does not depend on the batch.
        return per_choice.sum(dim=1)

    def _project(self, name: str, expert: int, x: Tensor) -> Tensor:
        experts: Any = self.experts
        weights = getattr(experts, name)
        if isinstance(weights, nn.ModuleList):
            parts: Any = weights[expert]
            outputs = [linear(x) for linear in parts]
            y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        else:
            y = x @ (weights[expert] if experts.is_transposed else weights[expert].T)
        return y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y


def stack_rows(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """One weight with the rows of all, where their formats allow it; otherwise the weights as they are."""
    first = weights[0]
    if len(weights) == 1:
        return [first]
    if isinstance(first, Int4Weight):
        same = [w for w in weights if isinstance(w, Int4Weight) and w.group_size == first.group_size]
        if len(same) == len(weights) and len({w.zero_point.dtype for w in same}) == 1:
            codes, scale, zero = (
                torch.cat([getattr(w, name) for w in same]) for name in ("codes", "scale", "zero_point")
            )
            return [Int4Weight(codes, scale, zero, first.group_size)]
    else:
        shared = [w for w in weights if isinstance(w, NVFP4Weight) and w.global_scale == first.global_scale]
        if len(shared) == len(weights):
            codes, scale = (torch.cat([getattr(w, name) for w in shared]) for name in ("codes", "scale"))
            return [NVFP4Weight(codes, scale, first.global_scale)]
    return list(weights)
