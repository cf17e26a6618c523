"""Mamba 1, the selective scan (Gu and Dao 2023, arXiv 2312.00752): Mamba, Falcon Mamba, Jamba.

With S a vector [N] for each channel, step d > 0, and A < 0 for each channel and element of the state:

    S ← exp(d A) S + d x B
    y = S · C + D x

Every element decays by its own factor, so tokens of a chunk cannot share products as in Mamba 2: a scan goes
token by token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.states.batch import StateBatch
from .state_format import StateInputs, StateShape, scan_by_steps


@dataclass(frozen=True)
class Mamba1Inputs(StateInputs):
    x: Tensor
    """[T, C]."""
    step: Tensor
    """[T, C]: d, positive."""
    b: Tensor
    """[T, N]."""
    c: Tensor
    """[T, N]."""
    a: Tensor
    """[C, N]."""
    d: Tensor | None
    """[C]: the part of x that passes by the state."""

    @classmethod
    def parameters(cls) -> frozenset[str]:
        return frozenset({"a", "d"})


class Mamba1:
    """A state [C, N] in float32."""

    inputs = Mamba1Inputs

    def shape(self, inputs: Mamba1Inputs) -> StateShape:
        return StateShape(tuple(inputs.a.shape), torch.float32)

    def step(self, inputs: Mamba1Inputs, states: Tensor) -> Tensor:
        x, step = inputs.x.float(), inputs.step.float()
        states.mul_((step[..., None] * inputs.a.float()).exp())
        states += (step * x)[..., None] * inputs.b.float()[:, None]
        output = (states * inputs.c.float()[:, None]).sum(2)
        if inputs.d is not None:
            output = output + x * inputs.d.float()
        return output.to(inputs.x.dtype)

    def scan(self, inputs: Mamba1Inputs, state: Tensor) -> Tensor:
        return scan_by_steps(self, inputs, len(inputs.x), state)

    def run_kernels(self, inputs: Mamba1Inputs, slots: Tensor, batch: StateBatch, output: Tensor) -> None:
        # Imported only where there is a GPU.
        from ...kernels.states.mamba1 import mamba1

        mamba1(inputs.x, inputs.step, inputs.b, inputs.c, inputs.a, inputs.d, slots, batch, output)
