"""Experts that compute what transformers' experts interface describes, but do not follow the interface.

Llama 4's experts get every row for every expert, in the order of experts; rows that were not routed to an
expert are zero. LongCat's router also chooses experts that return their input.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

TRANSPOSED = {"Llama4TextExperts": True, "LongcatFlashExperts": False, "Step3p7Experts": False}
"""For each class of experts, whether the weights are stored transposed, [E, K, N]."""


def adapt(experts: nn.Module) -> bool:
    """Give known experts the interface's attributes; return False for others."""
    is_transposed = TRANSPOSED.get(type(experts).__name__)
    if is_transposed is None:
        return False
    attributes: dict[str, Any] = {"has_gate": True, "has_bias": False, "is_transposed": is_transposed}
    activation: Callable[[Tensor], Tensor] = experts.act_fn  # type: ignore[assignment]

    def apply_gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    if not hasattr(experts, "_apply_gate"):
        attributes["_apply_gate"] = apply_gate
    for name, value in attributes.items():
        setattr(experts, name, value)
    return True


def rows_of_experts(hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the rows of [E * T, H] that experts have to compute, and the expert of each row: the rows that
    are not zero.

    On a GPU all rows are returned: for CUDA graphs, their number may not depend on the data.
    """
    expert = torch.arange(count, device=hidden.device).repeat_interleave(len(hidden) // count)
    if hidden.device.type == "cuda":
        return torch.arange(len(hidden), device=hidden.device), expert
    rows = hidden.any(1).nonzero()[:, 0]
    return rows, expert[rows]


def without_identities(
    experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return index and weights [T, top_k] without the experts that return their input, and the sum [T, H]
    that these experts add.
    """
    if not getattr(experts, "zero_expert_num", 0):
        return index, weights, None
    is_identity = index >= cast(int, experts.num_routed_experts)
    added = hidden * (weights * is_identity).sum(1, keepdim=True).to(hidden.dtype)
    return index.masked_fill(is_identity, 0), weights.masked_fill(is_identity, 0.0), added
