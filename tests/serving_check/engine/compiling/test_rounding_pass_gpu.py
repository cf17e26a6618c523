"""On a GPU, compiled layers in FP8 round in kernels of norms and SiLU times up, and lose nothing by it."""

import pytest
import torch
import torch._inductor.config
from scalegate.layouts.formats.fp8 import FP8
from scalegate.serving_check.engine.compiling import rounding_pass
from scalegate.serving_check.engine.compiling.compiled_layers import CompiledLayers, model_layers
from scalegate.serving_check.engine.compiling.cross_layer_fusion import fuse_across_layers
from scalegate.tests.serving_check.engine.compiling.test_cross_layer_fusion import CausalAttention
from scalegate.tests.serving_check.engine.compiling.test_pdl_gpu import random_model
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

E4M3_CAPABILITY = (8, 9)
MORE = 1.25
"""How much further than with a rounding apart logits may be from those of uncompiled layers. Either differ by
some 7%: eight random layers amplify how often a number is rounded to bf16 on its way.
"""


@pytest.fixture(autouse=True)
def _gpu():
    if torch.cuda.get_device_capability() < E4M3_CAPABILITY:
        pytest.skip("has no instructions for E4M3")


def test_kernels_round_what_they_make_and_lose_nothing_by_it(monkeypatch: pytest.MonkeyPatch):
    # Its cache does not know that the pass is switched off.
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    kernels, errors = [], []
    for device in ("none", "cuda"):
        monkeypatch.setattr(rounding_pass, "DEVICE", device)
        torch._dynamo.reset()
        model = random_model(FP8())

        @torch.inference_mode()
        def run(tokens: int = 37, model=model) -> torch.Tensor:
            ids = torch.arange(tokens, device=model.device)[None]
            return model(
                input_ids=ids, position_ids=ids, use_cache=False, paged=CausalAttention()
            ).logits.float()

        uncompiled = run(), run(200)
        with CompiledLayers(model, fuse_across_layers(model_layers(model), run)):
            run()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            answers = run(), run(200)
        kernels.append({event.name for event in profiler.events()})
        errors.append([float((a - u).norm() / u.norm()) for a, u in zip(answers, uncompiled, strict=True)])
    ours = {"norm_and_round_kernel", "silu_and_round_kernel"}
    assert not ours & kernels[0]
    assert ours <= kernels[1]
    assert all(fused <= MORE * apart for apart, fused in zip(*errors, strict=True)), errors
