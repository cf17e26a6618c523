"""State formats: a scan is the steps it stands for, wherever it is cut, and a slot belongs to one request."""

from dataclasses import fields

import pytest
import torch
from scalegate.layouts.states.all_states import STATE_FORMATS
from scalegate.layouts.states.gated_delta_rule import DeltaInputs
from scalegate.layouts.states.last_inputs import LastInputs
from scalegate.layouts.states.linear_recurrence import RecurrenceInputs
from scalegate.layouts.states.mamba1 import Mamba1Inputs
from scalegate.layouts.states.mamba2 import Mamba2Inputs
from scalegate.layouts.states.short_convolution import ConvolutionInputs
from scalegate.layouts.states.state_format import StateInputs
from torch import Tensor, randn
from transformers.models.bamba import modeling_bamba
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

TOKENS = 150
"""More than two chunks of every scan."""
OTHER_ORDER = 1e-4
"""Float32 sums of at most 150 terms in another order: 150 * 2**-24 of the largest term is 1e-5; a factor of
ten for the triangular systems, each of whose rows depends on the rows before it."""


def delta(decay_dims: int) -> DeltaInputs:
    shape = (TOKENS, 4, 8)[: 2 + decay_dims]
    return DeltaInputs(
        randn(TOKENS, 2, 8),
        randn(TOKENS, 2, 8),
        randn(TOKENS, 4, 6),
        -torch.rand(shape),
        torch.rand(TOKENS, 4),
    )


def all_inputs() -> dict[str, tuple[str, StateInputs]]:
    torch.manual_seed(5)
    channel_wise = delta(1)
    steps = torch.rand(TOKENS, 6) / 4
    b, c = randn(TOKENS, 3, 8), randn(TOKENS, 3, 8)
    return {
        "convolution": ("short_convolution", ConvolutionInputs(randn(TOKENS, 5), randn(5, 4), randn(5))),
        "window": ("last_inputs", LastInputs(randn(TOKENS, 5), 3)),
        "recurrence": ("linear_recurrence", RecurrenceInputs(randn(TOKENS, 5), -torch.rand(TOKENS, 5))),
        "delta": ("gated_delta_rule", delta(0)),
        "kimi": ("gated_delta_rule", channel_wise),
        "mamba2": ("mamba2", Mamba2Inputs(randn(TOKENS, 6, 4), steps, b, c, -torch.rand(6) * 4, randn(6))),
        "mamba1": (
            "mamba1",
            Mamba1Inputs(randn(TOKENS, 6), steps, b[:, 0], c[:, 0], -torch.rand(6, 8), None),
        ),
    }


KINDS = ("convolution", "window", "recurrence", "delta", "kimi", "mamba2", "mamba1")


def zeros_for(name: str, inputs: StateInputs) -> Tensor:
    shape = STATE_FORMATS[name].shape(inputs)
    return torch.zeros(shape.dims, dtype=shape.dtype)


def by_steps(name: str, inputs: StateInputs) -> tuple[Tensor, Tensor]:
    state = zeros_for(name, inputs)
    outputs = [STATE_FORMATS[name].step(inputs.part(slice(at, at + 1)), state[None]) for at in range(TOKENS)]
    return torch.cat(outputs), state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(), (1,), (64,), (1, 2, 70, 149)], ids=str)
def test_a_scan_is_its_steps_wherever_it_is_cut(kind, cuts):
    name, inputs = all_inputs()[kind]
    expected, last = by_steps(name, inputs)
    state = zeros_for(name, inputs)
    parts = zip((0, *cuts), (*cuts, TOKENS), strict=True)
    output = torch.cat([STATE_FORMATS[name].scan(inputs.part(slice(*part)), state) for part in parts])
    torch.testing.assert_close(output, expected, rtol=OTHER_ORDER, atol=OTHER_ORDER)
    torch.testing.assert_close(state, last, rtol=OTHER_ORDER, atol=OTHER_ORDER)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_carries_what_came_before(kind):
    name, inputs = all_inputs()[kind]
    expected, _ = by_steps(name, inputs)
    without = STATE_FORMATS[name].scan(inputs.part(slice(70, TOKENS)), zeros_for(name, inputs))
    assert (without[0] - expected[70]).abs().max() > 100 * OTHER_ORDER


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_several_requests_is_each_one_alone(kind):
    name, inputs = all_inputs()[kind]
    three = inputs.part(slice(0, 3))
    together = torch.stack([zeros_for(name, inputs)] * 3)
    output = STATE_FORMATS[name].step(three, together)
    for at in range(3):
        state = zeros_for(name, inputs)
        alone = STATE_FORMATS[name].step(three.part(slice(at, at + 1)), state[None])
        torch.testing.assert_close(alone[0], output[at])
        torch.testing.assert_close(state, together[at])


def test_steps_are_those_of_transformers():
    made = all_inputs()
    _, delta_inputs = made["delta"]
    names = [field.name for field in fields(delta_inputs)]
    given = [getattr(delta_inputs, name)[None] for name in names]
    theirs, _ = modeling_qwen3_next.torch_recurrent_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True)
    close(by_steps("gated_delta_rule", delta_inputs)[0], theirs[0])

    _, kimi = made["kimi"]
    query, key = (each.repeat_interleave(2, 1)[None] for each in (kimi.query, kimi.key))
    rest = kimi.value[None], kimi.log_decay[None], kimi.rate[None]
    theirs, _ = modeling_kimi_linear.recurrent_kimi_delta_attention(query, key, *rest, None, False, True)
    close(by_steps("gated_delta_rule", kimi)[0], theirs[0])

    _, ssm = made["mamba2"]
    theirs = modeling_bamba.mamba2_chunk_scan(
        ssm.x[None], ssm.step[None], ssm.a, ssm.b[None], ssm.c[None], chunk_size=16, D=ssm.d
    )
    close(by_steps("mamba2", ssm)[0], theirs[0])

    _, selective = made["mamba1"]
    theirs = modeling_jamba.mamba_selective_scan(
        *(each.T[None] for each in (selective.x, selective.step)),
        selective.a,
        *(each.T[None] for each in (selective.b, selective.c)),
    )
    close(by_steps("mamba1", selective)[0], theirs[0].T)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=OTHER_ORDER, atol=OTHER_ORDER)


def test_strong_decay_does_not_overflow():
    inputs = delta(1)
    strong = DeltaInputs(inputs.query, inputs.key, inputs.value, inputs.log_decay * 1000, inputs.rate)
    output = STATE_FORMATS["gated_delta_rule"].scan(strong, zeros_for("gated_delta_rule", strong))
    close(output, by_steps("gated_delta_rule", strong)[0])
