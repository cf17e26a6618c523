"""Mamba 1 and linear recurrences over slots, against float64; see conftest.py."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from scalegate.kernels.states.linear_recurrence import linear_recurrence
from scalegate.kernels.states.mamba1 import mamba1
from scalegate.layouts.states.linear_recurrence import RecurrenceInputs
from scalegate.layouts.states.mamba1 import Mamba1Inputs
from scalegate.layouts.states.state_format import StateInputs
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.interpreted.ragged_states import DEVICE, STEPS, Step, assert_close
from scalegate.tests.rounding_bounds import UNIT_ROUNDOFF
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Kind:
    """Functions of a format: its inputs, its kernels, a token in the inputs' dtype, and each channel's
    greatest exponent."""

    make: Callable[[int, int, torch.dtype], StateInputs]
    kernels: Callable[..., None]
    advance: Callable[..., Tensor]
    exponents: Callable[..., Tensor]
    state: Callable[..., tuple[int, ...]]


def mamba1_inputs(tokens: int, channels: int, dtype: torch.dtype, state_dim: int = 5) -> Mamba1Inputs:
    """Views of two projections; elements of a state that forget at once, and some that never do."""
    x, step = torch.randn(tokens, 2 * channels).to(DEVICE, dtype).split(channels, 1)
    _, b, c = torch.randn(tokens, 3 + 2 * state_dim).to(DEVICE, dtype).split([3, state_dim, state_dim], 1)
    rates = -torch.logspace(-3, 1.5, channels * state_dim).reshape(channels, state_dim)
    step = torch.nn.functional.softplus(step)
    return Mamba1Inputs(x, step, b, c, rates.to(DEVICE), torch.randn(channels).to(DEVICE, dtype))


def advance_mamba1(state: Tensor, x: Tensor, step: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor | None):
    state *= (step[:, None] * a).exp()
    state += (step * x)[:, None] * b
    y = (state * c).sum(1)
    return y if d is None else y + d * x


def recurrence_inputs(tokens: int, channels: int, dtype: torch.dtype) -> RecurrenceInputs:
    x = torch.randn(tokens, 2 * channels).to(DEVICE, dtype)[:, channels:]
    decay = -torch.rand(tokens, channels) * torch.logspace(-3, 1.5, channels)
    return RecurrenceInputs(x, decay.to(DEVICE))


def advance_recurrence(state: Tensor, x: Tensor, log_decay: Tensor) -> Tensor:
    state *= log_decay.exp()
    state += x
    return state.clone()


KINDS = {
    "mamba1": Kind(
        mamba1_inputs,
        mamba1,
        advance_mamba1,
        lambda inputs: inputs.step.double().amax(0) * inputs.a.double().abs().amax(1),
        lambda inputs: tuple(inputs.a.shape),
    ),
    "linear_recurrence": Kind(
        recurrence_inputs,
        linear_recurrence,
        advance_recurrence,
        lambda inputs: inputs.log_decay.double().abs().amax(0),
        lambda inputs: tuple(inputs.x.shape[1:]),
    ),
}


@dataclass
class Case:
    kind: Kind
    step: Step
    inputs: StateInputs
    slots: Tensor
    output: Tensor

    @classmethod
    def of(
        cls, name: str, step: Step, channels: int = 20, dtype: torch.dtype = torch.float32, **more
    ) -> "Case":
        torch.manual_seed(6)
        kind = KINDS[name]
        inputs = kind.make(step.tokens, channels, dtype, **more)
        slots = torch.randn(step.slots, *kind.state(inputs), device=DEVICE)
        output = torch.full((step.tokens, channels), 7.0).to(DEVICE, dtype)
        return cls(kind, step, inputs, slots, output)

    def values(self) -> dict[str, Tensor | None]:
        return {field.name: getattr(self.inputs, field.name) for field in fields(self.inputs)}

    def run(self) -> None:
        self.kind.kernels(*self.values().values(), self.slots, self.step.batch(), self.output)

    def expected(self, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        """Outputs and slots; or the sums of all terms' magnitudes, of which rounding is a share."""
        wide = {name: None if value is None else value.double() for name, value in self.values().items()}
        if magnitudes:
            wide |= {name: wide[name].abs() for name in ("x", "b", "c", "d") if wide.get(name) is not None}
        exact = replace(self.inputs, **wide)
        slots, output = (each.abs() if magnitudes else each for each in (self.slots, self.output))

        def scan(tokens: slice, state: Tensor) -> Tensor:
            parts = [exact.part(slice(at, at + 1)) for at in range(tokens.start, tokens.stop)]
            return torch.stack([self._advance(part, state) for part in parts])

        return self.step.expected(slots, output, scan)

    def _advance(self, part: StateInputs, state: Tensor) -> Tensor:
        given = {
            name: value if value is None or name in part.parameters() else value[0]
            for name, value in ((field.name, getattr(part, field.name)) for field in fields(part))
        }
        return self.kind.advance(state, **given)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Of each token a term is rounded some six times, exp and its exponent among them, whose absolute
        error is the term's relative one; and last the output. The interpreter cuts off what bf16 cannot hold.
        """
        outputs, slots = self.expected(magnitudes=True)
        u = UNIT_ROUNDOFF[torch.float32]
        share = max(self.step.counts) * u * (6 + self.kind.exponents(self.inputs))
        of_output = UNIT_ROUNDOFF[self.output.dtype] * (2 if DEVICE == "cpu" else 1)
        by_element = share.view(-1, *[1] * (slots.ndim - 2))
        return (share + of_output) * outputs, by_element * slots

    def check(self) -> None:
        expected, bounds = self.expected(), self.bounds()
        self.run()
        assert_close(self.output, expected[0], bounds[0])
        assert_close(self.slots, expected[1], bounds[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", exhaustive_but(DTYPES, torch.float32), ids=str)
@pytest.mark.parametrize("channels", exhaustive_but([20, 100], 20))
def test_a_step_is_each_request_alone(kind: str, name: str, channels: int, dtype: torch.dtype):
    Case.of(kind, STEPS[name], channels, dtype).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("state_dim", [1, 16, 32])
def test_any_size_of_state(state_dim: int):
    Case.of("mamba1", STEPS["mixed"], 40, state_dim=state_dim).check()


def test_without_what_passes_by_the_state():
    case = Case.of("mamba1", STEPS["decodes"])
    case.inputs = replace(case.inputs, d=None)
    case.check()


def test_channels_that_are_not_contiguous():
    case = Case.of("mamba1", STEPS["decodes"])
    case.inputs = replace(case.inputs, x=case.inputs.x.mT.contiguous().mT, b=case.inputs.b.mT.contiguous().mT)
    case.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 8, 37])
def test_a_prompt_cut_in_two_equals_the_whole(kind: str, cut: int):
    """Bit by bit: the steps have the same order."""
    whole, parts = (Case.of(kind, Step((40,), (0,))) for _ in range(2))
    whole.run()
    outputs = []
    for first, end in ((0, cut), (cut, 40)):
        step = Step((end - first,), (first,))
        tokens = slice(first, end)
        part = Case(whole.kind, step, parts.inputs.part(tokens), parts.slots, parts.output[tokens].clone())
        part.run()
        outputs.append(part.output)
    assert torch.equal(torch.cat(outputs), whole.output[:40])
    assert torch.equal(parts.slots, whole.slots)
