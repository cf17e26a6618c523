"""Products that round inputs and multiply them in 16 or 32 bits are counted, whatever their layout."""

import pytest
import torch
from scalegate.layouts.formats.e4m3 import PER_TOKEN
from scalegate.layouts.formats.fp8 import FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Input
from scalegate.layouts.modules.emulated_inputs import emulated_inputs
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import emulates_inputs
from torch import nn

FP8_INPUTS = (PER_TOKEN.label, PER_TOKEN.hardware)


def layer(spec, layout: str, input_format=None) -> QuantizedLinear:
    weight = spec.random(256, 256, torch.device("cpu"))
    return QuantizedLinear(LAYOUTS[layout].pack(weight, torch.bfloat16), None, input_format)


@pytest.mark.parametrize("layout", ["cpu_emulated", "emulated", "cpu_emulated_fixed_rows", "dequantize"])
def test_every_layout_without_a_product_of_its_own_emulates_fp8(layout: str) -> None:
    model = nn.Sequential(layer(FP8(), layout), layer(FP8(), layout), nn.Linear(256, 256))
    assert emulated_inputs(model) == {FP8_INPUTS: 2}


def test_inputs_that_a_checkpoint_states_are_emulated_too() -> None:
    rounding = NVFP4Input(torch.tensor(0.01), divides=False)
    assert emulated_inputs(layer(NVFP4(), "dequantize", rounding)) == {("NVFP4", rounding.hardware): 1}


@pytest.mark.parametrize("spec", [Int4(128), NVFP4()], ids=lambda spec: spec.key)
def test_formats_that_leave_inputs_alone_emulate_nothing(spec) -> None:
    assert emulated_inputs(layer(spec, "dequantize")) == {}


def test_a_layout_that_multiplies_rounded_inputs_itself_emulates_nothing() -> None:
    w4a8 = Int4(128, symmetric=True, activations="fp8")
    assert emulated_inputs(layer(w4a8, "int4_fp8")) == {}
    assert list(emulated_inputs(layer(w4a8, "swap_ab"))) == [(PER_TOKEN.label, w4a8.dynamic_input.hardware)]
    assert not emulates_inputs(LAYOUTS["fp8_scaled"])
    assert emulates_inputs(LAYOUTS["emulated"])
