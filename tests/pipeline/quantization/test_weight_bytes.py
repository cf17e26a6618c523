"""How many bytes a loaded model's weights take, whatever order a layout keeps them in."""

import pytest
import torch
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.pipeline.validation.in_process import weight_bytes
from torch import nn


@pytest.mark.parametrize("layout", ["cpu_onednn", "cpu_dequantized"])
def test_weights_in_an_opaque_order_count_too_and_shared_ones_once(layout: str):
    weight = NVFP4().random(64, 32, torch.device("cpu"))
    linear = QuantizedLinear(LAYOUTS[layout].pack(weight, torch.bfloat16), None)
    plain = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
    assert weight_bytes(nn.ModuleList([linear, plain, linear, plain])) == 2 * 64 * 32 * 2
