"""The last inputs of each channel, for modules that use them in their own computation (ZAYA)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.states.batch import StateBatch
from .state_format import StateInputs, StateShape


@dataclass(frozen=True)
class LastInputs(StateInputs):
    x: Tensor
    """[T, C]."""
    width: int
    """How many inputs before a token's own belong to its output."""

    @classmethod
    def parameters(cls) -> frozenset[str]:
        return frozenset({"width"})


class InputWindow:
    """A state is [C, width], with the oldest input first. Outputs [T, C, width + 1] are the state, then the
    token's own input.
    """

    inputs = LastInputs

    def shape(self, inputs: LastInputs) -> StateShape:
        return StateShape((inputs.x.shape[1], inputs.width), inputs.x.dtype)

    def step(self, inputs: LastInputs, states: Tensor) -> Tensor:
        window = torch.cat([states, inputs.x[:, :, None]], 2)
        states.copy_(window[:, :, 1:])
        return window

    def scan(self, inputs: LastInputs, state: Tensor) -> Tensor:
        seen = torch.cat([state, inputs.x.T], 1)
        state.copy_(seen[:, seen.shape[1] - inputs.width :])
        return seen.unfold(1, inputs.width + 1, 1).transpose(0, 1)

    def run_kernels(self, inputs: LastInputs, slots: Tensor, batch: StateBatch, output: Tensor) -> None:
        # Imported only where there is a GPU.
        from ...kernels.states.last_inputs import last_inputs

        last_inputs(inputs.x, slots, batch, output)
