"""GPTQ's small operations, recorded on a GPU and with_graph_replay: the bits of launching them one by one."""

import pytest
import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.pipeline.quantization.quantizers.all_quantizers import QUANTIZERS
from scalegate.pipeline.quantization.quantizers.nvfp4_least_squares import shared_global_scale
from scalegate.pipeline.quantization.quantizers.quantizer import CorrectingQuantizer
from scalegate.pipeline.quantization.solvers import second_order
from torch import Tensor

pytestmark = pytest.mark.gpu


def solved(spec: WeightFormat, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(96, 256, generator=generator, device="cuda") * 0.02
    inputs = torch.randn(1024, 256, generator=generator, device="cuda")
    corrector = QUANTIZERS[spec.name]
    assert isinstance(corrector, CorrectingQuantizer)
    curvature = second_order.prepare(inputs.T @ inputs, corrector.columns_together(spec))
    shared = {"global_scale": shared_global_scale(float(weight.abs().max())).cuda()} if spec.shared else {}
    return corrector.correct(weight, spec, torch.bfloat16, shared, curvature).weight.tensors()


@pytest.mark.parametrize("spec", [Int4(128), NVFP4()], ids=["int4", "nvfp4"])
def test_replayed_operations_give_the_bits_of_launched_ones(
    spec: WeightFormat, monkeypatch: pytest.MonkeyPatch
):
    with_graph_replay, other = solved(spec, 0), solved(spec, 1)
    assert spec != Int4(128) or second_order._choices.cache_info().hits
    monkeypatch.setattr(second_order, "with_graph_replay", lambda function: function)
    second_order.forget_recordings()
    launched = solved(spec, 0)
    second_order.forget_recordings()
    assert all(torch.equal(launched[name], with_graph_replay[name]) for name in launched)
    assert not torch.equal(launched["codes"], other["codes"])
