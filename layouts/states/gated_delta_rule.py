"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear.

With S a matrix [K, V] for each head, decay a <= 0 in log space, and rate b:

    S   ← exp(a) S                    a is one number for each head, or one for each key channel (Kimi)
    S   ← S + k (b (v - k^T S))^T     what S answers to k moves towards v
    out = S^T q / sqrt(K)             q and k have unit length

A scan computes C tokens at once. With A[t] the sum of a up to t, and u[t] what t adds to S along k[t], the
tokens of a chunk depend on each other through a triangular system only (the paper's section 3.3):

    u[t] = b[t] (v[t] - (exp(A[t]) k[t])^T S - sum over j < t of (k[t] · exp(A[t] - A[j]) k[j]) u[j])

All exponents are at most 0, so nothing overflows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.states.batch import StateBatch
from .state_format import StateInputs, StateShape

CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens that a scan computes at once: fewer with a decay for each channel, which takes K times the
memory."""
EPSILON = 1e-6
"""Added to a vector's squared length, as in flash-linear-attention and transformers."""


@dataclass(frozen=True)
class DeltaInputs(StateInputs):
    query: Tensor
    """[T, H_k, K]."""
    key: Tensor
    """[T, H_k, K]; each of its heads serves H / H_k consecutive heads of values."""
    value: Tensor
    """[T, H, V]."""
    log_decay: Tensor
    """[T, H], or [T, H, K]."""
    rate: Tensor
    """[T, H]."""


class GatedDeltaRule:
    """A state [H, K, V] in float32."""

    inputs = DeltaInputs

    def shape(self, inputs: DeltaInputs) -> StateShape:
        heads, value_dim = inputs.value.shape[1:]
        return StateShape((heads, inputs.key.shape[2], value_dim), torch.float32)

    def step(self, inputs: DeltaInputs, states: Tensor) -> Tensor:
        query, key, value, log_decay, rate = _prepared(inputs)
        states.mul_(log_decay.exp()[..., None])
        answer = (states * key[..., None]).sum(2)
        states += key[..., None] * ((value - answer) * rate)[:, :, None]
        return (states * query[..., None]).sum(2).to(inputs.query.dtype)

    def scan(self, inputs: DeltaInputs, state: Tensor) -> Tensor:
        query, key, value, log_decay, rate = (each.transpose(0, 1) for each in _prepared(inputs))
        count = value.shape[1]
        output = torch.empty_like(value)
        size = CHUNK if log_decay.shape[2] == 1 else CHANNEL_CHUNK
        for first in range(0, count, size):
            part = slice(first, min(first + size, count))
            output[:, part] = _scan_chunk(
                query[:, part], key[:, part], value[:, part], log_decay[:, part], rate[:, part], state
            )
        return output.transpose(0, 1).to(inputs.query.dtype)

    def run_kernels(self, inputs: DeltaInputs, slots: Tensor, batch: StateBatch, output: Tensor) -> None:
        # Imported only where there is a GPU.
        from ...kernels.states.gated_delta_rule import gated_delta_rule

        gated_delta_rule(
            inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.rate, slots, batch, output
        )


def _prepared(inputs: DeltaInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return everything in float32 with H heads: unit queries, scaled, and keys [T, H, K]; values [T, H, V];
    decays [T, H, 1 or K]; rates [T, H, 1]."""
    query, key = inputs.query.float(), inputs.key.float()
    query = query * torch.rsqrt((query * query).sum(2, keepdim=True) + EPSILON) * query.shape[2] ** -0.5
    key = key * torch.rsqrt((key * key).sum(2, keepdim=True) + EPSILON)
    shared = inputs.value.shape[1] // key.shape[1]
    if shared > 1:
        query, key = query.repeat_interleave(shared, 1), key.repeat_interleave(shared, 1)
    decay = inputs.log_decay.float()
    if decay.ndim == 2:
        decay = decay[..., None]
    return query, key, inputs.value.float(), decay, inputs.rate.float()[..., None]


def _scan_chunk(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> Tensor:
    """Compute [H, C, V] from query and key [H, C, K], value [H, C, V], log_decay [H, C, 1 or K] and rate [H,
    C, 1].
    """
    summed = log_decay.cumsum(1)
    grown = summed.exp()
    count = key.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=key.device).triu(1)
    # [H, C, C, 1 or K]: how much of what token j adds is left at token t; nothing of later tokens.
    left = (summed[:, :, None] - summed[:, None]).masked_fill(later[:, :, None], -torch.inf).exp()
    if left.shape[3] == 1:
        by_keys, by_queries = (each @ key.transpose(1, 2) * left[..., 0] for each in (key, query))
    else:
        by_keys, by_queries = (torch.einsum("htk,hjk,htjk->htj", each, key, left) for each in (key, query))
    system = rate * by_keys
    added = torch.linalg.solve_triangular(
        system, rate * (value - (key * grown) @ state), upper=False, unitriangular=True
    )
    output = (query * grown) @ state + by_queries @ added
    until_end = (summed[:, -1:] - summed).exp()
    state.mul_(grown[:, -1, :, None])
    state += (key * until_end).transpose(1, 2) @ added
    return output
