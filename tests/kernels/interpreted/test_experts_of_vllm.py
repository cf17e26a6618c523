"""A layer of experts as the plugin of vLLM computes it, in vLLM's scratch memory; see conftest.py."""

import pytest
import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.grouped_experts import GroupedInt4, GroupedNVFP4
from scalegate.vllm_plugin.experts_product import Products, tokens_to_compile
from torch import Tensor
from torch.nn import functional

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 256, 128


def layer(spec, dtype: torch.dtype) -> tuple[Products, list[Tensor]]:
    """A layer with random weights, and these weights in float64: gate_up [E, 2I, H] and down [E, H, I]."""
    packing = GroupedNVFP4() if isinstance(spec, NVFP4) else GroupedInt4()
    weights = [
        [spec.random(n, k, DEVICE) for _ in range(EXPERTS)] for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    ]
    packed = [packing.pack_experts(each, dtype) for each in weights]
    tensors = [
        tuple(each.tensors.get(name) for each in packed) for name in ("words", "scale_words", "factor")
    ]
    dense = [torch.stack([weight.dequantize(torch.float64) for weight in each]) for each in weights]
    return Products(spec, *tensors, HIDDEN, INNER), dense


def reference(x: Tensor, expert: Tensor, share: Tensor, dense: list[Tensor]) -> Tensor:
    gate_up, down = dense
    gate, up = torch.einsum("th,tjnh->tjn", x.double(), gate_up[expert]).chunk(2, -1)
    rows = torch.einsum("tji,tjhi->tjh", functional.silu(gate) * up, down[expert])
    return (rows * share.double().unsqueeze(-1)).sum(1)


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("spec", [Int4(128), NVFP4()], ids=["int4", "nvfp4"])
def test_a_layer_in_scratch_memory_that_overlaps_its_answer(spec, tokens):
    """vLLM's answer begins where the first scratch memory does, and either holds what was there before.

    In bfloat16 on a GPU, since NVFP4's kernel knows no other type; the interpreter multiplies float16 alone.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    products, dense = layer(spec, dtype)
    x = torch.randn(tokens, HIDDEN, device=DEVICE).to(dtype)
    share, expert = torch.rand(tokens, EXPERTS, device=DEVICE).softmax(-1).topk(TOP_K, -1)
    first, second = (
        torch.full((tokens * TOP_K, 2 * INNER), torch.inf, device=DEVICE).to(dtype) for _ in "12"
    )
    out = first.view(-1)[: tokens * HIDDEN].view(tokens, HIDDEN)
    products.multiply(x, expert.int(), share, (first, second), out)
    expected = reference(x, expert, share, dense)
    # x's type rounds what lies between four times, each by half a unit in the last place at most.
    bound = 4 * torch.finfo(dtype).eps / 2
    assert (out.double() - expected).norm() / expected.norm() < bound


def test_every_bucket_of_rows_an_expert_gets_is_compiled_once():
    few = tokens_to_compile(128, 8, 8192)
    assert few == (1, 2, 5, 81, 161, 321, 769)
    assert tokens_to_compile(128, 8, 100) == (1, 2, 5, 81)
