"""Inputs in NVFP4: rounded as torchao rounds them, token by token, by a linear layer before its product."""

import pytest
import torch
from scalegate.layouts.formats.int4 import pack_nibbles
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Input, NVFP4Weight
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.packing.all_layouts import LAYOUTS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOTH = pytest.mark.parametrize("divides", [True, False], ids=["compressed-tensors", "ModelOpt"])

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the code's low three bits."""


def calibrated(x: torch.Tensor, divides: bool) -> NVFP4Input:
    multiplier = x.abs().amax().float() / (6 * 448)
    return NVFP4Input(1 / multiplier if divides else multiplier, divides)


def unit(divides: bool) -> NVFP4Input:
    return NVFP4Input(torch.tensor(1.0), divides)


def as_torchao(x: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=multiplier).dequantize(x.dtype)


@BOTH
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("beyond", [1.0, 6.0], ids=["as calibrated", "larger than calibrated"])
def test_inputs_are_rounded_as_torchao_rounds_them_but_for_last_bits(device, dtype, beyond, divides):
    shares = []
    for _ in range(8):  # how many scales differ depends on the calibrated one
        x = torch.randn(33, 256, device=device).to(dtype)
        quantized = calibrated(x / beyond, divides)
        multiplier = 1 / quantized.global_scale if divides else quantized.global_scale
        rounded, theirs = quantized.round(x), as_torchao(x, multiplier)
        assert rounded.dtype is dtype
        shares.append(((rounded - theirs).abs() > 0.01 * theirs.abs()).float().mean().item())
        error = ((rounded - x).float().norm() / x.float().norm()).item()
        assert 0.05 < error < 0.2 if beyond == 1.0 else error > 0.2
    # Scales found in bfloat16 come out as the next one in one group of seventy. Last bits differ more often.
    assert sum(shares) / len(shares) < (0.03 if dtype is torch.bfloat16 else 0.001)


@BOTH
def test_ties_go_to_the_even_code_and_what_is_too_large_to_the_largest(divides):
    # The 6 in each group makes its scale 1.
    given = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, -0.25, -0.75, -5.0, 0.0, 0.3, 1.7, -2.6, 6.0]
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -1.0, -4.0, 0.0, 0.5, 1.5, -3.0, 6.0]
    assert unit(divides).round(torch.tensor([given])).tolist() == [wanted]


@BOTH
def test_groups_of_zeros_and_of_next_to_nothing_are_zeros(divides):
    x = torch.zeros(3, 32)
    x[1, :16] = 1e-9
    x[2, 16:] = 6.0
    assert torch.equal(unit(divides).round(x), torch.where(x > 1, x, 0.0))


@BOTH
def test_what_else_is_in_the_batch_does_not_matter(divides):
    x = torch.randn(8, 64)
    quantized = calibrated(x, divides)
    assert torch.equal(quantized.round(x)[3:4], quantized.round(x[3:4].clone()))
    assert not torch.equal(calibrated(x * 3, divides).round(x)[3:4], quantized.round(x[3:4]))


@BOTH
def test_values_that_nvfp4_can_say_stay_as_they_are(divides):
    x = torch.tensor([[*E2M1_VALUES, *(-value for value in E2M1_VALUES)]])
    for power in (-4, 0, 4):
        assert torch.equal(unit(divides).round(x * 2.0**power), x * 2.0**power)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_rounds_its_input_and_nothing_else(device, bias):
    weight = NVFP4().random(48, 96, torch.device(device))
    packed = LAYOUTS["dequantize"].pack(weight, torch.bfloat16)
    x = torch.randn(2, 5, 96, dtype=torch.bfloat16, device=device)
    quantized = calibrated(x, divides=False)
    plain = QuantizedLinear(packed, torch.ones(48, dtype=torch.bfloat16, device=device) if bias else None)
    rounding = QuantizedLinear(packed, plain.bias.data if bias else None, quantized)
    before = x.clone()
    with torch.inference_mode():
        assert torch.equal(rounding(x), plain(quantized.round(x)))
        assert not torch.equal(rounding(x), plain(x))
    assert torch.equal(x, before)


def test_the_scale_of_the_inputs_moves_with_the_module():
    weight = NVFP4().random(32, 64, torch.device("cpu"))
    packed = LAYOUTS["dequantize"].pack(weight, torch.bfloat16)
    moved = QuantizedLinear(packed, None, NVFP4Input(torch.tensor(0.5), divides=True)).to("meta")
    assert moved.input_format is not None and moved.input_format.divides
    assert moved.input_format.global_scale.device.type == "meta"
    assert moved.state_dict() == {}


def test_codes_stand_for_the_values_of_e2m1():
    codes = torch.arange(16, dtype=torch.uint8)
    weight = NVFP4Weight(
        NVFP4(), pack_nibbles(codes[None]), torch.ones(1, 1).to(torch.float8_e4m3fn), torch.tensor(1.0)
    )
    expected = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    assert torch.equal(weight.dequantize(torch.float32)[0], expected)
