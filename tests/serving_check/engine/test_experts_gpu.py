"""Mixtures of experts on a GPU: from graphs, with nothing compiled in traffic, and exact."""

import copy
from dataclasses import replace

import pytest
import torch
from scalegate.layouts.formats.int4 import Int4, Int4Weight
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Weight
from scalegate.layouts.modules.experts import ExpertsPart, PackedExperts, is_experts, parameters_of
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Experts, Problem
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.tests.serving_check.engine import test_exactness as exactness
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel, Qwen2MoeConfig

pytestmark = pytest.mark.gpu

SIZES, GREEDY, NEW_TOKENS = exactness.SIZES, exactness.GREEDY, exactness.NEW_TOKENS
ARCHITECTURES = {name: exactness.ARCHITECTURES[name] for name in ("qwen3_moe", "mixtral", "gpt_oss")} | {
    "deepseek_v3": DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 3}),
        first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=4, topk_group=2, kv_lora_rank=32, q_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
}  # fmt: skip
MAX_ERROR = 4e-3
MORE_THAN_PLAIN = 1.5
"""Of the error that plain experts have in bf16: theirs and ours are two draws of the same roundings."""
ENGINE = {"max_num_seqs": 32, "prefill_chunk": 64, "decode_buckets": (1, 4, 32)}


def exact_in_bf16(weight: Int4Weight | NVFP4Weight) -> Int4Weight | NVFP4Weight:
    """Its like with powers of two for scales and quarters for zeros.

    Kernels apply global scales and zeros later than `dequantize` does, so other weights are rounded otherwise
    on either side, which two products and what lies between them make more of than the bound.
    """
    if isinstance(weight, NVFP4Weight):
        exact = replace(weight, global_scale=torch.tensor(2.0**-7, device=weight.codes.device))
    else:
        scale = torch.exp2(weight.scale.float().log2().round()).to(weight.scale.dtype)
        zero = weight.zero_point
        zero = (zero * 4).round() / 4 if zero.is_floating_point() else zero
        exact = replace(weight, scale=scale, zero_point=zero)
    assert torch.equal(exact.dequantize(torch.bfloat16).double(), exact.dequantize(torch.float64))
    return exact


def packed(model: PreTrainedModel, spec, layout: str) -> list[tuple[PackedExperts, PackedExperts]]:
    """Each experts module with random weights of a format dequantized, and with the same ones packed."""
    found = []
    for name, module in list(model.named_modules()):
        if not is_experts(module):
            continue
        products = {}
        for parameter, weight in parameters_of(module).items():
            experts, n, k = weight.shape
            problem = Problem(spec, n, k, weight.dtype, weight.device, Experts(experts, 2))
            assert LAYOUTS[layout].refuses(problem) is None
            weights = [exact_in_bf16(spec.random(n, k, weight.device)) for _ in range(experts)]
            weight.copy_(torch.stack([expert.dequantize(weight.dtype) for expert in weights]))
            products[parameter] = [ExpertsPart(LAYOUTS[layout].pack_experts(weights, weight.dtype))]
        dequantized = PackedExperts(copy.deepcopy(module), {})
        replacement = PackedExperts(module, products)
        model.set_submodule(name, replacement)
        found.append((dequantized, replacement))
    return found


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_token_is_that_of_generate_in_float32(architecture: str, compiled: bool):
    model = exactness.lively_model(ARCHITECTURES[architecture]).cuda()
    prompts = exactness.ragged_prompts()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        output = model.generate(
            ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
        expected.append(tuple(output[0, len(prompt) :].tolist()))
    assert len(set(expected)) == len(prompts), "too dull to prove it"

    engine = Engine(copy.deepcopy(model), EngineOptions(**ENGINE, compiled=compiled), frozenset())
    assert any(isinstance(module, PackedExperts) for module in engine.runner.model.modules())
    engine.warm_up(progress=False)
    assert [answer.token_ids for answer in engine.generate(prompts, GREEDY)] == expected
    assert [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts[:3]] == expected[:3]
    assert engine.stats().compilations == ()


@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (Int4(32), "grouped_int4"),
        (Int4(32, zero_point="fractional"), "grouped_int4"),
        (Int4(32), "grouped_dequantize"),
        (NVFP4(), "grouped_nvfp4"),
        (NVFP4(), "grouped_dequantize"),
    ],
    ids=["int4", "int4 fractional", "int4 dequantized", "nvfp4", "nvfp4 dequantized"],
)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@torch.inference_mode()
def test_packed_experts_are_the_dequantized_ones(architecture: str, spec, layout: str, tokens: int):
    config = copy.deepcopy(ARCHITECTURES[architecture])
    config.hidden_size, config.moe_intermediate_size, config.intermediate_size = 128, 96, 96
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            parameter.data.normal_(0, 0.02)
    for dequantized, module in packed(model, spec, layout):
        count = module.num_experts
        x = torch.randn(tokens, 128, device="cuda").bfloat16()
        expert = torch.rand(tokens, count, device="cuda").topk(2).indices
        weights = torch.rand(tokens, 2, device="cuda").bfloat16()
        y = module(x, expert, weights).float()
        expected = dequantized(x, expert, weights).float()
        assert (y - expected).norm() / expected.norm() <= MAX_ERROR


@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
@pytest.mark.parametrize("zero_point", ["integer", "fractional"])
@torch.inference_mode()
def test_experts_that_are_served_whole_are_the_dequantized_ones_in_float32(zero_point: str, tokens: int):
    torch.manual_seed(17)
    config = copy.deepcopy(ARCHITECTURES["qwen3_moe"])
    config.hidden_size, config.moe_intermediate_size = 256, 128
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    exact = copy.deepcopy(model).float()
    served = packed(model, Int4(128, zero_point=zero_point), "grouped_int4")
    modules = [module for module in exact.modules() if is_experts(module)]
    for (dequantized, module), theirs in zip(served, modules, strict=True):
        assert module.is_served_whole
        for name, parts in dequantized.parts.items():
            theirs.get_parameter(name).copy_(dequantized.packed[parts[0]].tensors["weight"])
        in_float32 = PackedExperts(theirs, {})
        x = torch.randn(tokens, 256, device="cuda").bfloat16()
        expert = torch.rand(tokens, module.num_experts, device="cuda").topk(2).indices
        weights = torch.rand(tokens, 2, device="cuda").bfloat16()
        expected = in_float32(x.float(), expert, weights.float())

        def error(served_by: PackedExperts, expected: torch.Tensor = expected, inputs=(x, expert, weights)):
            return (served_by(*inputs).float() - expected).norm() / expected.norm()

        # Five values in a row are rounded to bf16: .0045 on average, .0058 at most (400 draws of 5 tokens).
        assert error(module) <= MORE_THAN_PLAIN * error(dequantized)


@pytest.mark.parametrize(
    ("spec", "layout", "sizes"),
    [
        (Int4(32), "grouped_int4", (128, 96)),
        (Int4(128), "grouped_int4", (256, 128)),
        (NVFP4(), "grouped_nvfp4", (128, 96)),
    ],
    ids=["int4", "int4 served whole", "nvfp4"],
)
def test_quantized_experts_are_served_from_graphs_and_nothing_compiles(spec, layout: str, sizes):
    config = copy.deepcopy(ARCHITECTURES["qwen3_moe"])
    config.hidden_size, config.moe_intermediate_size = sizes
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    packed(model, spec, layout)
    engine = Engine(model, EngineOptions(**ENGINE), frozenset())
    engine.warm_up(progress=False)
    prompts = exactness.ragged_prompts()
    together = [answer.token_ids for answer in engine.generate(prompts, GREEDY)]
    assert [len(answer) for answer in together] == [NEW_TOKENS] * len(prompts) and len(set(together)) > 1
    assert len(engine.generate(prompts[:1], GREEDY)[0].token_ids) == NEW_TOKENS
    assert engine.stats().compilations == ()
    assert engine.runner.graphs.captured
