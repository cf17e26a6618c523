"""A linear recurrence in each channel (RG-LRU; De et al. 2024, arXiv 2402.19427): RecurrentGemma.

S ← exp(a) S + x                  a <= 0 is one number for each token and channel
y = S
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.states.batch import StateBatch
from .state_format import StateInputs, StateShape, scan_by_steps


@dataclass(frozen=True)
class RecurrenceInputs(StateInputs):
    x: Tensor
    """[T, C]."""
    log_decay: Tensor
    """[T, C]."""


class LinearRecurrence:
    """A state [C] in float32."""

    inputs = RecurrenceInputs

    def shape(self, inputs: RecurrenceInputs) -> StateShape:
        return StateShape(tuple(inputs.x.shape[1:]), torch.float32)

    def step(self, inputs: RecurrenceInputs, states: Tensor) -> Tensor:
        states.mul_(inputs.log_decay.float().exp())
        states += inputs.x.float()
        return states.to(inputs.x.dtype, copy=True)

    def scan(self, inputs: RecurrenceInputs, state: Tensor) -> Tensor:
        return scan_by_steps(self, inputs, len(inputs.x), state)

    def run_kernels(self, inputs: RecurrenceInputs, slots: Tensor, batch: StateBatch, output: Tensor) -> None:
        # Imported only where there is a GPU.
        from ...kernels.states.linear_recurrence import linear_recurrence

        linear_recurrence(inputs.x, inputs.log_decay, slots, batch, output)
