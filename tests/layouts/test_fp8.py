"""FP8: inputs rounded by token within the format's half steps, and products that emulate it in float32."""

from dataclasses import replace

import pytest
import torch
from scalegate.layouts.choosing.choose import default_layout
from scalegate.layouts.formats.e4m3 import E4M3_MAX, PER_BLOCK, PER_TOKEN, E4M3Input
from scalegate.layouts.formats.fp8 import FP8, SCALES
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Experts, Problem
from scalegate.layouts.packing.routing import Routing
from scalegate.tests.rounding_bounds import rounded, summed
from torch.nn import functional

CPU = torch.device("cpu")
N, K = 48, 384
HALF_STEP, HALF_STEP_OF_SUBNORMALS = 2.0**-4, 2.0**-10
"""Of three bits of mantissa: half of 2^-3 of the power of two below a value; subnormals are 2^-9 apart."""
EMULATED = ("cpu_emulated", "emulated")
SPECS = [FP8(scale) for scale in SCALES]


def tokens(rows: int = 9) -> torch.Tensor:
    """Of all sizes, and within a token from next to nothing to the largest."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, K, generator=generator) * torch.logspace(-6, 0, K)
    return x * torch.logspace(-3, 3, rows)[:, None]


def test_rounding_errs_by_half_a_step_of_the_format() -> None:
    x = tokens()
    scale = x.abs().amax(1, keepdim=True) / E4M3_MAX
    bound = torch.maximum(HALF_STEP * x.abs(), HALF_STEP_OF_SUBNORMALS * scale) * (1 + 2.0**-20)
    error = (PER_TOKEN.round(x) - x).abs()
    assert bool((error <= bound).all())
    assert bool((error > 0.9 * bound).any()), "a finer grid would pass too"
    assert torch.equal(PER_TOKEN.round(x).abs().amax(1), (scale * E4M3_MAX)[:, 0])


@pytest.mark.parametrize("rounding", [PER_TOKEN, PER_BLOCK], ids=["token", "block"])
def test_a_token_is_rounded_by_itself(rounding: E4M3Input) -> None:
    x = tokens().bfloat16()
    assert torch.equal(rounding.round(x)[3:4], rounding.round(x[3:4].clone()))
    assert rounding.round(x).dtype is torch.bfloat16
    assert rounding.round(x[:0]).shape == (0, K)


def test_every_128_inputs_are_rounded_as_tokens_of_their_own() -> None:
    x = tokens()
    parts = [PER_TOKEN.round(part) for part in x.split(128, 1)]
    assert torch.equal(PER_BLOCK.round(x), torch.cat(parts, 1))
    assert not torch.equal(PER_BLOCK.round(x), PER_TOKEN.round(x))
    assert PER_BLOCK.label != PER_TOKEN.label, "layers merge by that"


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e-43, 1e-38])
def test_tokens_of_next_to_nothing_stay_finite(value: float) -> None:
    x = torch.full((2, 8), value)
    assert bool((PER_TOKEN.round(x).abs() <= x.abs()).all()) or torch.allclose(PER_TOKEN.round(x), x)
    assert bool(PER_TOKEN.codes(x)[0].float().isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_products_are_those_of_rounded_inputs(spec: FP8, dtype: torch.dtype) -> None:
    weight, x = spec.random(N, K, CPU), tokens().to(dtype)
    codes, scale = spec.dynamic_input.codes(x)
    wide = weight.dequantize(torch.float64).T
    expected = (codes.double().unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1) @ wide
    # The product of a code and its scale, and y, are rounded; sums are float32's.
    bound = rounded(torch.float32) + rounded(dtype) + summed(K)
    for name in EMULATED:
        y = LAYOUTS[name].matmul(x, LAYOUTS[name].pack(weight, dtype)).double()
        assert float((y - expected).norm() / expected.norm()) <= bound, name
        unrounded = x.double() @ wide
        assert float((y - unrounded).norm() / unrounded.norm()) > 2 * bound, "inputs were not rounded"


def test_a_cpu_emulates_it_and_takes_no_layout_that_rounds_in_16_bits() -> None:
    for spec in SPECS:
        problem = Problem(spec, N, K, torch.bfloat16, CPU)
        assert default_layout(problem) == EMULATED[0]
        serving = {name for name, layout in LAYOUTS.items() if layout.refuses(problem) is None}
        assert serving == set(EMULATED)
        assert "emulates them" in (LAYOUTS["dequantize"].refuses(problem) or "")
        experts = replace(problem, experts=Experts(4, 2))
        assert default_layout(experts) == f"{EMULATED[0]}_per_expert"
        pinned = replace(problem, batch_invariance="pin")
        assert default_layout(pinned) == f"{EMULATED[0]}_fixed_rows"


def test_a_layer_rounds_its_input_once_whatever_its_layout() -> None:
    weight, x = FP8().random(N, K, CPU), tokens()
    plain = functional.linear(PER_TOKEN.round(x), weight.dequantize(torch.float32))
    for name in (*EMULATED, "dequantize"):
        layer = QuantizedLinear(LAYOUTS[name].pack(weight, torch.float32), None)
        assert torch.equal(layer(x), plain), name
        assert layer.input_format is PER_TOKEN


def test_experts_round_the_inputs_of_their_tokens() -> None:
    layout = LAYOUTS["cpu_emulated_per_expert"]
    weights = [FP8().random(N, K, CPU) for _ in range(3)]
    expert = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)
    x = tokens(2)
    y = layout.grouped_matmul(x, layout.pack_experts(weights, torch.float32), Routing.of(expert, 3, "tuned"))
    rows = [(x[t], weights[e]) for t, chosen in enumerate(expert.tolist()) for e in chosen]
    expected = torch.cat([PER_TOKEN.round(row[None]) @ w.dequantize(torch.float32).T for row, w in rows])
    assert float((y - expected).norm() / expected.norm()) <= summed(K)
