"""Mamba 2 (Dao and Gu 2024, arXiv 2405.21060): Nemotron-H, Granite 4, Bamba, Falcon-H1, Zamba 2.

With S a matrix [P, N] for each head, step d > 0, and A < 0 one number for each head:

    S ← exp(d A) S + d x B^T
    y = S C + D x

A scan computes Q tokens at once (the paper's section 6): products of pairs of tokens within a chunk, each
decayed by the tokens between them, and the state for all tokens before the chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.states.batch import StateBatch
from .state_format import StateInputs, StateShape

CHUNK = 64
"""Number of tokens that a scan computes at once."""


@dataclass(frozen=True)
class Mamba2Inputs(StateInputs):
    x: Tensor
    """[T, H, P]."""
    step: Tensor
    """[T, H]: d, positive."""
    b: Tensor
    """[T, G, N]; each group serves H / G consecutive heads."""
    c: Tensor
    """[T, G, N]."""
    a: Tensor
    """[H]."""
    d: Tensor | None
    """[H]: the part of x that passes by the state."""

    @classmethod
    def parameters(cls) -> frozenset[str]:
        return frozenset({"a", "d"})


class Mamba2:
    """A state [H, P, N] in float32."""

    inputs = Mamba2Inputs

    def shape(self, inputs: Mamba2Inputs) -> StateShape:
        return StateShape((*inputs.x.shape[1:], inputs.b.shape[2]), torch.float32)

    def step(self, inputs: Mamba2Inputs, states: Tensor) -> Tensor:
        x, step, b, c = _by_head(inputs)
        states.mul_((step * inputs.a.float()).exp()[..., None, None])
        states += (step[..., None] * x)[..., None] * b[:, :, None]
        return _with_skip((states * c[:, :, None]).sum(3), inputs, x)

    def scan(self, inputs: Mamba2Inputs, state: Tensor) -> Tensor:
        x, step, b, c = (each.transpose(0, 1) for each in _by_head(inputs))
        output = torch.empty_like(x)
        count = x.shape[1]
        for first in range(0, count, CHUNK):
            part = slice(first, min(first + CHUNK, count))
            output[:, part] = _scan_chunk(
                x[:, part], step[:, part], b[:, part], c[:, part], inputs.a.float(), state
            )
        return _with_skip(output.transpose(0, 1), inputs, x.transpose(0, 1))

    def run_kernels(self, inputs: Mamba2Inputs, slots: Tensor, batch: StateBatch, output: Tensor) -> None:
        # Imported only where there is a GPU.
        from ...kernels.states.mamba2 import mamba2

        mamba2(inputs.x, inputs.step, inputs.b, inputs.c, inputs.a, inputs.d, slots, batch, output)


def _by_head(inputs: Mamba2Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return in float32 x [T, H, P], steps [T, H], B and C [T, H, N]."""
    heads = inputs.x.shape[1] // inputs.b.shape[1]
    b, c = (each.float().repeat_interleave(heads, 1) for each in (inputs.b, inputs.c))
    return inputs.x.float(), inputs.step.float(), b, c


def _with_skip(output: Tensor, inputs: Mamba2Inputs, x: Tensor) -> Tensor:
    if inputs.d is not None:
        output = output + x * inputs.d.float()[:, None]
    return output.to(inputs.x.dtype)


def _scan_chunk(x: Tensor, step: Tensor, b: Tensor, c: Tensor, a: Tensor, state: Tensor) -> Tensor:
    """Compute [H, Q, P] from x [H, Q, P], step [H, Q], b and c [H, Q, N], and a [H]."""
    summed = (step * a[:, None]).cumsum(1)[..., None]
    count = x.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
    # [H, Q, Q]: how much of what token j adds is left at token t; nothing of later tokens.
    left = (summed - summed.transpose(1, 2)).masked_fill(later, -torch.inf).exp()
    added = x * step[..., None]
    output = (c @ b.transpose(1, 2) * left) @ added + (c * summed.exp()) @ state.transpose(1, 2)
    state.mul_(summed[:, -1:].exp())
    state += (added * (summed[:, -1:] - summed).exp()).transpose(1, 2) @ b
    return output
