"""RMSNorm modules are replaced by the compiled kernel where it gives what they give, and nowhere else."""

import pytest
import torch
from scalegate.serving_check.engine import cpu_norms
from scalegate.serving_check.engine.cpu_norms import CpuRMSNorm, compile_norms
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


class ShiftedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1


class Model(nn.Module):
    def __init__(self, norm: nn.Module, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.norm = norm.to(dtype)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.normal_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "dim"), [(Qwen3RMSNorm, 96), (LlamaRMSNorm, 256)])
def test_a_norm_is_replaced_and_gives_what_it_gave(kind, dim, dtype):
    torch.manual_seed(0)
    model = Model(kind(dim, eps=1e-5), dtype)
    original = model.norm
    assert compile_norms(model) == 1 and isinstance(model.norm, CpuRMSNorm)
    assert model.norm.weight is original.weight
    x = torch.randn(3, 2, dim, 2, dtype=torch.float32).to(dtype)[..., 0]
    bound = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 8)
    with torch.inference_mode():
        torch.testing.assert_close(model.norm(x), original(x), rtol=bound, atol=0.0)
    assert compile_norms(model) == 0, "it is not replaced twice"


@pytest.mark.parametrize(
    "norm",
    [
        ShiftedRMSNorm(64),
        Gemma3RMSNorm(64),
        LlamaRMSNorm(48),
        nn.LayerNorm(64),
        nn.RMSNorm(64, eps=None),
    ],
    ids=lambda norm: f"{type(norm).__name__}",
)
def test_a_module_that_does_something_else_is_left_alone(norm):
    model = Model(norm)
    assert compile_norms(model) == 0 and model.norm is norm


def test_many_numbers_are_left_to_torchs_threads(monkeypatch):
    model = Model(LlamaRMSNorm(64))
    original, calls = model.norm, []
    compile_norms(model)
    original.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(cpu_norms, "LARGEST_ON_ONE_THREAD", 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with torch.inference_mode():
        model.norm(torch.randn(2, 64).bfloat16())
        assert not calls
        model.norm(torch.randn(3, 64).bfloat16())
    assert calls
