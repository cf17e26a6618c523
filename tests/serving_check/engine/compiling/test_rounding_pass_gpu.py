"""On a GPU, an engine in FP8 rounds in the kernels of norms and of SiLU times up, and answers as without."""

import pytest
import torch
from scalegate.layouts.formats.fp8 import FP8
from scalegate.serving_check.engine.compiling import rounding_pass
from scalegate.serving_check.engine.compiling.compiled_layers import CompiledLayers, model_layers
from scalegate.serving_check.engine.compiling.cross_layer_fusion import fuse_across_layers
from scalegate.tests.serving_check.engine.compiling.test_cross_layer_fusion import CausalAttention
from scalegate.tests.serving_check.engine.compiling.test_pdl_gpu import random_model
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

E4M3_CAPABILITY = (8, 9)
MOST_DIFFERENCE = 0.05
"""Relative, of logits: codes next to each other differ by 2^-3, and few differ."""


@pytest.fixture(autouse=True)
def _gpu():
    if torch.cuda.get_device_capability() < E4M3_CAPABILITY:
        pytest.skip("has no instructions for E4M3")


def test_kernels_round_what_they_make_and_change_little(monkeypatch: pytest.MonkeyPatch):
    answers, kernels = [], []
    for fuses in (False, True):
        if not fuses:
            monkeypatch.setattr(rounding_pass, "DEVICE", "none")
        model = random_model(FP8())

        @torch.inference_mode()
        def run(tokens: int = 37, model=model) -> torch.Tensor:
            ids = torch.arange(tokens, device=model.device)[None]
            return model(
                input_ids=ids, position_ids=ids, use_cache=False, paged=CausalAttention()
            ).logits.float()

        chain = fuse_across_layers(model_layers(model), run)
        with CompiledLayers(model, chain):
            run()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            answers.append((run(), run(200)))
        kernels.append({event.name for event in profiler.events()})
        monkeypatch.undo()
    ours = {"norm_and_round_kernel", "silu_and_round_kernel"}
    assert not ours & kernels[0]
    assert ours <= kernels[1]
    for apart, fused in zip(*answers, strict=True):
        assert (apart - fused).norm() <= MOST_DIFFERENCE * apart.norm()
