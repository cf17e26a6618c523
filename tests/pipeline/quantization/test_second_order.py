"""GPTQ with our grids in its loop: its outputs are nearer than data-free rounding's."""

import pytest
import torch
from scalegate.layouts.formats.fp8 import FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.mxfp4 import MXFP4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.pipeline.quantization.quantizers.all_quantizers import QUANTIZERS
from scalegate.pipeline.quantization.quantizers.quantizer import (
    CorrectingQuantizer,
    QuantizedWeight,
    SharingQuantizer,
)
from scalegate.pipeline.quantization.solvers import second_order
from scalegate.pipeline.quantization.solvers.second_order import prepare
from torch import Tensor

N, K = 48, 256
SPECS = [Int4(128), Int4(32), Int4(64, symmetric=True), Int8(64), NVFP4(), MXFP4(), FP8(), FP8("tensor")]


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    """fp32 [2048, K]: a few directions hold most of it, as in a trained model."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(2048, 24, generator=generator) @ torch.randn(24, K, generator=generator)
    return mixed + 0.5 * torch.randn(2048, K, generator=generator)


def both(weight: Tensor, hessian: Tensor, spec: WeightFormat) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Rounded without the inputs, and with them."""
    quantizer = QUANTIZERS[spec.name]
    assert isinstance(quantizer, CorrectingQuantizer)
    shared = {}
    if spec.shared and isinstance(quantizer, SharingQuantizer):
        shared = quantizer.shared_tensors(spec, quantizer.measure(weight))
    curvature = prepare(hessian, quantizer.columns_together(spec))
    return (
        quantizer.quantize(weight, spec, torch.bfloat16, shared),
        quantizer.correct(weight, spec, torch.bfloat16, shared, curvature),
    )


def output_error(quantized: QuantizedWeight, weight: Tensor, inputs: Tensor) -> float:
    return float((inputs @ (quantized.weight.dequantize(torch.float32) - weight).T).square().sum())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_outputs_are_nearer_and_weights_are_not(weight: Tensor, inputs: Tensor, spec: WeightFormat) -> None:
    plain, better = both(weight, inputs.T @ inputs, spec)
    assert output_error(better, weight, inputs) < 0.5 * output_error(plain, weight, inputs)
    assert better.relative_error > plain.relative_error
    distance = float((better.weight.dequantize(torch.float32) - weight).square().sum())
    assert better.squared_error == pytest.approx(distance, rel=1e-4)
    for name, tensor in better.weight.tensors().items():
        assert tensor.dtype == plain.weight.tensors()[name].dtype
        assert tensor.shape == plain.weight.tensors()[name].shape


@pytest.mark.parametrize("spec", [Int4(128), NVFP4(), MXFP4()], ids=lambda spec: spec.key)
def test_descent_only_lowers_the_error(
    weight: Tensor, inputs: Tensor, spec: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    for sweeps in (0, 1, 3):
        monkeypatch.setattr(second_order, "SWEEPS", sweeps)
        errors.append(output_error(both(weight, inputs.T @ inputs, spec)[1], weight, inputs))
    assert errors[0] > errors[1] > errors[2]


def test_inputs_that_say_nothing_give_about_what_no_inputs_do(weight: Tensor) -> None:
    plain, better = both(weight, torch.eye(K), Int4(128))
    assert better.relative_error == pytest.approx(plain.relative_error, rel=0.02)


def test_rows_do_not_depend_on_their_neighbours(weight: Tensor, inputs: Tensor) -> None:
    hessian = inputs.T @ inputs
    whole = both(weight, hessian, Int4(128))[1].weight
    part = both(weight[:16], hessian, Int4(128))[1].weight
    assert torch.equal(whole.rows(0, 16).dequantize(), part.dequantize())


def test_errors_handed_on_late_reach_every_column_of_a_group(
    weight: Tensor, inputs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_order, "SWEEPS", 0)
    late = output_error(both(weight, inputs.T @ inputs, Int4(128))[1], weight, inputs)
    monkeypatch.setattr(second_order, "LAZY", 128)
    at_once = output_error(both(weight, inputs.T @ inputs, Int4(128))[1], weight, inputs)
    assert late == pytest.approx(at_once, rel=0.01)


def test_what_is_kept_for_one_format_is_not_taken_for_another(weight: Tensor, inputs: Tensor) -> None:
    second_order.forget_recordings()
    alone = both(weight, inputs.T @ inputs, Int4(64))[1].weight
    second_order.forget_recordings()
    for spec in (Int4(64, symmetric=True), Int4(64)):
        after_another = both(weight, inputs.T @ inputs, spec)[1].weight
    assert torch.equal(after_another.dequantize(), alone.dequantize())


def test_zero_weights_and_dead_inputs_are_taken(inputs: Tensor) -> None:
    dead = inputs.clone()
    dead[:, :40] = 0
    for spec in SPECS:
        _, better = both(torch.zeros(4, K), dead.T @ dead, spec)
        assert not better.weight.dequantize().any()
        _, nothing_seen = both(torch.ones(4, K) * 0.01, torch.zeros(K, K), spec)
        assert bool(nothing_seen.weight.dequantize().isfinite().all())
