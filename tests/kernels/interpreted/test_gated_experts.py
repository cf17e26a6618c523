"""INT4 experts of a layer served whole, for one token and for several; see conftest.py."""

import pytest
import torch
from scalegate.kernels.experts import gated, one_token
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.modules.experts import ExpertsPart, PackedExperts, parameters_of
from scalegate.layouts.packing.all_layouts import LAYOUTS
from torch import nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, HIDDEN, INNER = 4, 128, 128


def qwen3_moe(activation: str = "silu") -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, hidden_act=activation
    )
    return filled(Qwen3MoeExperts(config))


def gpt_oss() -> nn.Module:
    return filled(
        GptOssExperts(GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS))
    )


def filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.1)
    return module.half().to(DEVICE).requires_grad_(False)


def packed(experts: nn.Module, spec: Int4, mode="tuned") -> tuple[dict[str, list], PackedExperts]:
    """Random INT4 weights, and the module with them packed for the grouped product."""
    weights = {
        name: [spec.random(n, k, DEVICE) for _ in range(count)]
        for name, (count, n, k) in (
            (name, parameter.shape) for name, parameter in parameters_of(experts).items()
        )
    }
    pack = LAYOUTS["grouped_int4"].pack_experts
    parts = {name: [ExpertsPart(pack(ws, torch.float16))] for name, ws in weights.items()}
    return weights, PackedExperts(experts, parts, mode)


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_layer_served_whole_computes_what_the_dequantized_module_does(tokens: int):
    torch.manual_seed(1)
    weights, ours = packed(qwen3_moe(), Int4(128))
    assert ours.is_served_whole
    theirs = qwen3_moe().float()
    for name, of_experts in weights.items():
        theirs.get_parameter(name).copy_(
            torch.stack([weight.dequantize(torch.float32) for weight in of_experts])
        )
    x = torch.randn(tokens, HIDDEN, device=DEVICE).half()
    expert = torch.rand(tokens, EXPERTS, device=DEVICE).topk(2).indices
    share = torch.rand(tokens, 2, device=DEVICE).half()
    expected = theirs(x.float(), expert, share.float())
    y = ours(x, expert, share)
    assert y.shape == expected.shape and y.dtype == torch.float16
    assert (y - expected).norm() / expected.norm() < 2e-3
    swapped = ours(x, expert.flip(1), share)
    assert (swapped - expected).norm() / expected.norm() > 0.05, "shares are not told apart"


def test_one_token_takes_its_own_kernels_and_more_take_grouped_products(monkeypatch):
    _, ours = packed(qwen3_moe(), Int4(128))
    taken = []
    monkeypatch.setattr(one_token, "experts", lambda x, *rest: taken.append("one") or x.clone())
    monkeypatch.setattr(gated, "grouped_experts", lambda x, *rest: taken.append("grouped") or x.clone())
    for tokens in (1, 2):
        x = torch.zeros(tokens, HIDDEN, dtype=torch.float16, device=DEVICE)
        expert = torch.zeros(tokens, 2, dtype=torch.int64, device=DEVICE)
        ours(x, expert, torch.ones(tokens, 2, device=DEVICE))
    assert taken == ["one", "grouped"]


@torch.inference_mode()
def test_a_graph_traced_for_several_tokens_takes_one_tokens_kernels_for_one(monkeypatch):
    """As an engine compiles layers: sizes unknown, and no guards to compile again by."""
    torch.manual_seed(3)
    _, ours = packed(qwen3_moe(), Int4(128))
    torch._dynamo.reset()
    options = {"guard_filter_fn": lambda entries: [False] * len(entries)}
    traced = torch.compile(ours, backend="eager", fullgraph=True, options=options)
    alone = one_token.experts
    taken = []
    monkeypatch.setattr(one_token, "experts", lambda *given: taken.append(given) or alone(*given))
    for tokens in (3, 1):
        x = torch.randn(tokens, HIDDEN, device=DEVICE).half()
        given = (
            x,
            torch.rand(tokens, EXPERTS, device=DEVICE).topk(2).indices,
            torch.rand(tokens, 2, device=DEVICE),
        )
        if tokens > 1:
            for tensor in given:
                torch._dynamo.mark_dynamic(tensor, 0)
        y = traced(*given)
        assert y.shape == (tokens, HIDDEN) and torch.equal(y, ours(*given))
    assert len(taken) == 2


def test_what_bits_biases_other_activations_or_groups_ask_for_is_not_served_whole():
    assert packed(qwen3_moe(), Int4(128, zero_point="fractional"))[1].is_served_whole
    assert not packed(qwen3_moe(), Int4(128), mode="pin")[1].is_served_whole
    assert not packed(qwen3_moe("gelu"), Int4(128))[1].is_served_whole
    assert not packed(qwen3_moe(), Int4(64))[1].is_served_whole
    assert not packed(gpt_oss(), Int4(128))[1].is_served_whole
    assert not PackedExperts(qwen3_moe(), {}).is_served_whole


@pytest.mark.parametrize("inner", [768, 1100])
def test_silu_and_the_sum_over_experts_are_those_of_the_references(inner: int):
    torch.manual_seed(2)
    gate_up = (torch.randn(6, 2 * inner, device=DEVICE) * 4).half()
    torch.testing.assert_close(
        gated.silu_and_multiply(gate_up), gated.silu_and_multiply_reference(gate_up), rtol=1e-3, atol=1e-6
    )
    rows, share = torch.randn(6, inner, device=DEVICE).half(), torch.rand(2, 3, device=DEVICE)
    torch.testing.assert_close(
        gated.weighted_sum(rows, share), gated.weighted_sum_reference(rows, share), rtol=1e-3, atol=2e-3
    )
