"""Mamba 2 over slots, against the recurrence in float64; see conftest.py."""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import pytest
import torch
from scalegate.kernels.states.mamba2 import mamba2
from scalegate.layouts.states.mamba2 import Mamba2Inputs
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.interpreted.ragged_states import DEVICE, STEPS, Step, assert_close
from scalegate.tests.rounding_bounds import UNIT_ROUNDOFF
from torch import Tensor


class Shape(NamedTuple):
    heads: int
    head_dim: int
    groups: int
    state_dim: int


SMALL = Shape(6, 4, 3, 5)
SHAPES = [SMALL, Shape(2, 20, 1, 24), Shape(4, 64, 2, 128), Shape(1, 64, 1, 256), Shape(3, 40, 3, 16)]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
"""The interpreter multiplies in fp32 only."""


def inputs_of(tokens: int, shape: Shape, dtype: torch.dtype) -> Mamba2Inputs:
    """Views of one projection, as models make them; heads that forget at once and heads that never do."""
    heads, head_dim, groups, state_dim = shape
    torch.manual_seed(4)
    sizes = [heads * head_dim, groups * state_dim, groups * state_dim, heads]
    x, b, c, step = torch.randn(tokens, sum(sizes)).to(DEVICE, dtype).split(sizes, 1)
    return Mamba2Inputs(
        x.unflatten(1, (heads, head_dim)),
        torch.nn.functional.softplus(step),
        b.unflatten(1, (groups, state_dim)),
        c.unflatten(1, (groups, state_dim)),
        -torch.logspace(-3, 1.5, heads).to(DEVICE),
        torch.randn(heads).to(DEVICE, dtype),
    )


def by_tokens(inputs: Mamba2Inputs, state: Tensor) -> Tensor:
    """Compute the recurrence token by token, in the inputs' dtype; `state` changes in place."""
    shared = inputs.x.shape[1] // inputs.b.shape[1]
    outputs = []
    for x, step, b, c in zip(inputs.x, inputs.step, inputs.b, inputs.c, strict=True):
        b, c = (each.repeat_interleave(shared, 0) for each in (b, c))
        state *= (step * inputs.a).exp()[:, None, None]
        state += (step[:, None] * x)[:, :, None] * b[:, None]
        y = (state * c[:, None]).sum(2)
        outputs.append(y if inputs.d is None else y + x * inputs.d[:, None])
    return torch.stack(outputs)


@dataclass
class Case:
    step: Step
    inputs: Mamba2Inputs
    slots: Tensor
    output: Tensor

    @classmethod
    def of(cls, step: Step, shape: Shape = SMALL, dtype=torch.float32) -> "Case":
        inputs = inputs_of(step.tokens, shape, dtype)
        slots = torch.randn(step.slots, *shape[:2], shape[3], device=DEVICE)
        return cls(step, inputs, slots, torch.full_like(inputs.x, 7.0, memory_format=torch.contiguous_format))

    def run(self) -> None:
        values = [getattr(self.inputs, field.name) for field in fields(self.inputs)]
        mamba2(*values, self.slots, self.step.batch(), self.output)

    def expected(self, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        """Outputs and slots; or the sums of all terms' magnitudes, of which rounding is a share."""
        inputs = self.inputs
        values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        wide = {name: None if value is None else value.double() for name, value in values.items()}
        if magnitudes:
            wide |= {name: wide[name].abs() for name in ("x", "b", "c", "d") if wide[name] is not None}
        exact = Mamba2Inputs(**wide)
        slots, output = (each.abs() if magnitudes else each for each in (self.slots, self.output))
        return self.step.expected(slots, output, lambda tokens, state: by_tokens(exact.part(tokens), state))

    def check(self) -> None:
        expected, sizes = self.expected(), self.expected(magnitudes=True)
        self.run()
        of_output = UNIT_ROUNDOFF[self.inputs.x.dtype]
        share = self.rounding()
        assert_close(self.output, expected[0], share * sizes[0] + of_output * expected[0].abs())
        assert_close(self.slots, expected[1], share[..., None] * sizes[1])

    def rounding(self) -> Tensor:
        """The share [H, 1] of all terms' magnitudes that may be lost; `rounding_bounds.py` says why roots.

        An exponent is the difference of two sums of up to 64 decays, and exp makes of its absolute error a
        relative one. Three products follow each other; with bf16 their operands in fp32 are split into two of
        bf16, which leaves 2^-17. Their sums have N or 64 terms.
        """
        inputs = self.inputs
        u = UNIT_ROUNDOFF[torch.float32]
        largest = 64 * (inputs.step.double() * inputs.a.double().abs()).amax(0)
        left = 2.0**-17 if inputs.x.dtype == torch.bfloat16 else u
        terms = max(inputs.b.shape[2], 64)
        return (2 * 64**0.5 * u * largest + 3 * (left + terms**0.5 * u))[:, None]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", exhaustive_but(SHAPES, SMALL), ids=str)
def test_a_step_is_each_request_alone(name: str, shape: Shape, dtype: torch.dtype):
    Case.of(STEPS[name], shape, dtype).check()


@pytest.mark.exhaustive
def test_without_what_passes_by_the_state():
    case = Case.of(STEPS["mixed"])
    case.inputs = replace(case.inputs, d=None)
    case.check()


@pytest.mark.exhaustive
def test_inputs_whose_last_dimension_is_not_contiguous():
    case = Case.of(STEPS["mixed"])
    for name in ("x", "step", "b"):
        value = getattr(case.inputs, name)
        case.inputs = replace(case.inputs, **{name: value.mT.contiguous().mT})
    case.check()


@pytest.mark.parametrize("cut", exhaustive_but([1, 63, 64, 65, 149], 65))
def test_a_prompt_cut_in_two_equals_the_whole(cut: int):
    whole = Case.of(Step((150,), (0,)))
    expected, sizes = whole.expected(), whole.expected(magnitudes=True)
    slots, outputs = whole.slots, []
    for first, end in ((0, cut), (cut, 150)):
        step = Step((end - first,), (first,))
        part = Case(step, whole.inputs.part(slice(first, end)), slots, whole.output[first:end].clone())
        part.run()
        outputs.append(part.output)
    share = whole.rounding()
    assert_close(torch.cat(outputs), expected[0][:150], share * sizes[0][:150])
    assert_close(slots, expected[1], share[..., None] * sizes[1])


@pytest.mark.exhaustive
def test_more_requests_than_are_looked_at_together():
    Case.of(Step([1] * 150 + [70] + [1] * 107 + [3, 2], [4] * 260), Shape(1, 4, 1, 5)).check()


@pytest.mark.exhaustive
def test_strong_decay_does_not_overflow():
    case = Case.of(STEPS["chunks"])
    case.inputs = replace(case.inputs, a=case.inputs.a * 100)
    case.run()
    assert case.output.isfinite().all() and case.slots.isfinite().all()
