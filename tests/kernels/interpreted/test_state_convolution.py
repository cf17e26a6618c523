"""Short convolutions over slots, against float64; see conftest.py."""

import pytest
import torch
from scalegate.kernels.states.short_convolution import TOKENS, short_convolution
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.interpreted.ragged_states import DEVICE, STEPS, Step
from scalegate.tests.rounding_bounds import UNIT_ROUNDOFF
from torch import Tensor


class Layer:
    """A layer's weights, and a view as a projection of more channels gives it."""

    def __init__(self, step: Step, channels: int, width: int, dtype: torch.dtype, bias: bool = True):
        torch.manual_seed(3)
        joined = torch.randn(step.tokens, channels + 32).to(DEVICE, dtype)
        self.x = joined[:, 16 : 16 + channels]
        self.weight = torch.randn(channels, width).to(DEVICE, dtype)
        self.bias = torch.randn(channels).to(DEVICE, dtype) if bias else None
        self.slots = torch.randn(step.slots, channels, width - 1).to(DEVICE, dtype)
        self.output = torch.full((step.tokens, channels), 7.0).to(DEVICE, dtype)

    def scan(self, tokens: slice, state: Tensor) -> Tensor:
        window = torch.cat([state, self.x[tokens].double().T], 1)
        state.copy_(window[:, window.shape[1] - state.shape[1] :])
        unfolded = window.unfold(1, self.weight.shape[1], 1)
        output = (unfolded * self.weight.double()[:, None]).sum(2).T
        return output if self.bias is None else output + self.bias.double()

    def bound(self) -> float:
        """Of W products and a bias, none larger than the largest: rounded one by one in float32, and at last
        to the output's dtype. The interpreter cuts off what bf16 cannot hold.
        """
        terms = self.weight.shape[1] + 1
        inputs = max(float(self.x.abs().max()), float(self.slots.abs().max()), 1.0)
        largest = terms * float(self.weight.abs().max()) * inputs
        output = UNIT_ROUNDOFF[self.x.dtype] * (2 if DEVICE == "cpu" else 1)
        return largest * (terms * UNIT_ROUNDOFF[torch.float32] + output)

    def run(self, step: Step) -> None:
        short_convolution(self.x, self.weight, self.bias, self.slots, step.batch(), self.output)


def check(step: Step, layer: Layer) -> None:
    output, slots = step.expected(layer.slots, layer.output, layer.scan)
    layer.run(step)
    # States are inputs, moved and not rounded.
    assert torch.equal(layer.slots.double(), slots)
    torch.testing.assert_close(layer.output.double(), output, rtol=0, atol=layer.bound())


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", exhaustive_but([torch.bfloat16, torch.float32], torch.float32), ids=str)
@pytest.mark.parametrize(("channels", "width"), exhaustive_but([(20, 4), (300, 3), (16, 2)], (20, 4)))
def test_a_step_is_each_request_alone(name: str, dtype: torch.dtype, channels: int, width: int):
    check(STEPS[name], Layer(STEPS[name], channels, width, dtype))


def test_a_block_of_tokens_begins_with_the_last_one_that_needs_a_state():
    step = Step((TOKENS - 2, 20), (0, 5))
    check(step, Layer(step, 20, 4, torch.float32))


def test_without_a_bias():
    check(STEPS["mixed"], Layer(STEPS["mixed"], 20, 4, torch.float32, bias=False))


@pytest.mark.parametrize("cut", [1, 2, 37])
def test_a_prompt_cut_in_two_equals_the_whole(cut: int):
    """Bit by bit: sums have the same order."""
    whole = Step((40,), (0,))
    layer, parts = (Layer(whole, 20, 4, torch.float32) for _ in range(2))
    layer.run(whole)
    x, output = parts.x, parts.output
    for first, end in ((0, cut), (cut, 40)):
        parts.x, parts.output = x[first:end], output[first:end]
        parts.run(Step((end - first,), (first,)))
    assert torch.equal(output[:40], layer.output[:40])
    assert torch.equal(parts.slots, layer.slots)


@pytest.mark.exhaustive
def test_more_requests_than_are_looked_at_together():
    step = Step([1] * 298 + [3, 2], [4] * 300)
    check(step, Layer(step, 20, 4, torch.float32))
