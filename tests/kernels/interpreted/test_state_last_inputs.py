"""Windows of last inputs over slots: numbers are moved, so all are equal; see conftest.py."""

import pytest
import torch
from scalegate.kernels.states.last_inputs import last_inputs
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.interpreted.ragged_states import DEVICE, STEPS, Step
from torch import Tensor


def scan(x: Tensor, state: Tensor) -> Tensor:
    seen = torch.cat([state, x.double().T], 1)
    width = state.shape[1]
    state.copy_(seen[:, seen.shape[1] - width :])
    return seen.unfold(1, width + 1, 1).transpose(0, 1)


def check(step: Step, channels: int, width: int) -> None:
    torch.manual_seed(8)
    x = torch.randn(step.tokens, channels + 32, device=DEVICE)[:, 16 : 16 + channels]
    slots = torch.randn(step.slots, channels, width, device=DEVICE)
    output = torch.full((step.tokens, channels, width + 1), 7.0, device=DEVICE)
    expected = step.expected(slots, output, lambda tokens, state: scan(x[tokens], state))
    last_inputs(x, slots, step.batch(), output)
    assert torch.equal(output.double(), expected[0])
    assert torch.equal(slots.double(), expected[1])


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("channels", "width"), exhaustive_but([(20, 3), (300, 1)], (20, 3)))
def test_a_step_is_each_request_alone(name: str, channels: int, width: int):
    check(STEPS[name], channels, width)


@pytest.mark.exhaustive
def test_more_requests_than_are_looked_at_together():
    check(Step([1] * 298 + [3, 2], [4] * 300), 20, 1)
