"""Short causal convolution over each channel by itself, whose state is the last W - 1 inputs.

    y[t] = sum over i < W of weight[i] * x[t - W + 1 + i] + bias

LFM2's layers are such convolutions; gated delta rule and Mamba layers begin with one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.states.batch import StateBatch
from .state_format import StateInputs, StateShape


@dataclass(frozen=True)
class ConvolutionInputs(StateInputs):
    x: Tensor
    """[T, C]."""
    weight: Tensor
    """[C, W]; the last column is for the newest input."""
    bias: Tensor | None
    """[C]."""

    @classmethod
    def parameters(cls) -> frozenset[str]:
        return frozenset({"weight", "bias"})


class ShortConvolution:
    """A state is [C, W - 1], with the oldest input first."""

    inputs = ConvolutionInputs

    def shape(self, inputs: ConvolutionInputs) -> StateShape:
        channels, width = inputs.weight.shape
        return StateShape((channels, width - 1), inputs.x.dtype)

    def step(self, inputs: ConvolutionInputs, states: Tensor) -> Tensor:
        window = torch.cat([states, inputs.x[:, :, None]], 2)
        states.copy_(window[:, :, 1:])
        output = (window.to(inputs.weight.dtype) * inputs.weight).sum(2)
        return (output if inputs.bias is None else output + inputs.bias).to(inputs.x.dtype)

    def scan(self, inputs: ConvolutionInputs, state: Tensor) -> Tensor:
        window = torch.cat([state, inputs.x.T], 1)
        state.copy_(window[:, window.shape[1] - state.shape[1] :])
        weight = inputs.weight
        output = functional.conv1d(
            window[None].to(weight.dtype), weight[:, None], inputs.bias, groups=len(weight)
        )
        return output[0].T.to(inputs.x.dtype)

    def run_kernels(
        self, inputs: ConvolutionInputs, slots: Tensor, batch: StateBatch, output: Tensor
    ) -> None:
        # Imported only where there is a GPU.
        from ...kernels.states.short_convolution import short_convolution

        short_convolution(inputs.x, inputs.weight, inputs.bias, slots, batch, output)
