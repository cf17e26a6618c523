"""vLLM's layers of experts through the plugin: what is packed, what Marlin keeps. The product itself is in
`tests/kernels/interpreted/test_experts_of_vllm.py`.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch
from scalegate.kernels.experts import int4, nvfp4
from scalegate.kernels.nvfp4.packing import FACTOR
from scalegate.tests.vllm_plugin import stand_in
from scalegate.tests.vllm_plugin.test_stored import words_of
from torch import nn

EXPERTS, TOP_K, HIDDEN, INNER, GROUP = 3, 2, 256, 128, 64
SHAPES = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
"""[N, K] of gate_up and of down."""


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, with the plugin registered and every layer of experts taken for faster."""
    found = stand_in.install(monkeypatch)
    modules = {
        name: importlib.import_module(f"scalegate.vllm_plugin.{name}")
        for name in ("cache_key", "choice", "experts", "register", "serving", "speed", "warm_up")
    }
    monkeypatch.setattr(modules["cache_key"], "SERVED", set())
    found.experts, found.asked, found.warmed, found.ahead = modules["experts"], [], [], []
    found.decision = modules["speed"].Decision(True, "faster")

    def decide(gpu, kind, dtype, n, k, rows):
        found.asked.append((kind, n, k))
        return found.decision

    monkeypatch.setattr(modules["choice"], "decide", decide)
    monkeypatch.setattr(modules["choice"].Gpu, "of", lambda device: modules["choice"].Gpu((9, 0), 132))
    serves = SimpleNamespace(refuses=lambda problem: None)
    packing = {spec: SimpleNamespace(refuses=serves.refuses, pack_experts=each.pack_experts)
               for spec, each in modules["choice"].EXPERTS.items()}  # fmt: skip
    for module in ("choice", "experts"):
        monkeypatch.setattr(modules[module], "EXPERTS", packing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(modules["experts"], "warm_up", lambda *arguments: found.warmed.append(arguments))
    ahead = lambda *arguments: found.ahead.append(arguments)  # noqa: E731
    monkeypatch.setattr(modules["serving"], "compile_experts_ahead", ahead)
    modules["warm_up"].PENDING.clear()
    found.warm_up_pending = modules["warm_up"].warm_up_pending
    modules["register"].register()
    return found


def layer(**fields) -> nn.Module:
    config = {
        "num_local_experts": EXPERTS, "experts_per_token": TOP_K, "hidden_dim": HIDDEN,
        "intermediate_size_per_partition": INNER, "in_dtype": torch.bfloat16, "activation": "silu",
        "swiglu_limit": None, "is_lora_enabled": False, "moe_backend": "auto",
        "moe_parallel_config": SimpleNamespace(use_ep=False),
    }  # fmt: skip
    made = nn.Module()
    made.apply_router_weight_on_input = fields.pop("apply_router_weight_on_input", False)
    made.moe_config = SimpleNamespace(**{**config, **fields})
    return made


def int4_checkpoint(zero_points: bool):
    """What vLLM has loaded: words [E, K/8, N], scales [E, K/g, N], zero points [E, K/g, N/8]; and the
    weights.
    """
    words, scales, zeros, weights = [], [], [], []
    for n, k in SHAPES:
        codes = torch.randint(0, 16, (EXPERTS, n, k))
        zero = torch.randint(0, 16, (EXPERTS, n, k // GROUP)) if zero_points else torch.full((1, 1, 1), 8)
        scale = torch.rand(EXPERTS, n, k // GROUP).add(0.5).mul(0.01).to(torch.bfloat16)
        words.append(torch.stack([words_of(each, 4).t() for each in codes]))
        scales.append(scale.transpose(1, 2).contiguous())
        zeros.append(torch.stack([words_of(each.t(), 4) for each in zero]) if zero_points else None)
        spread = zero.repeat_interleave(GROUP, 2) if zero_points else zero
        weights.append((codes - spread) * scale.float().repeat_interleave(GROUP, 2))
    return words, scales, zeros, weights


def process_int4(vllm, made, words, scales, zeros, *, bits=4, actorder=None, bias=None):
    order = torch.zeros(EXPERTS, 1, dtype=torch.int32)
    form = None, bits, 32 // bits, GROUP, actorder
    return vllm.int_wna16._process_weights_marlin(
        made, *form, *words, *scales, order, order, *zeros, bias, None
    )


@pytest.mark.parametrize("zero_points", [False, True])
def test_int4_experts_are_packed_with_their_zero_points(vllm, zero_points):
    words, scales, zeros, weights = int4_checkpoint(zero_points)
    found = process_int4(vllm, layer(), words, scales, zeros)
    assert len(found) == 14, "as many as vLLM unpacks"
    for which, (n, _) in enumerate(SHAPES):
        packed = int4.reference_weight(found[which], found[2 + which], n, GROUP, False, torch.bfloat16, False)
        # The scale is bf16 on both sides, and codes and zero points are whole numbers below 256.
        assert torch.equal(packed, weights[which])
    assert found[8] is found[9] is None, "zero points are in the scales"
    kind = "zp" if zero_points else "sym"
    assert vllm.asked == [(f"int4 g{GROUP} {kind} ({EXPERTS} experts, top {TOP_K})", *SHAPES[0])]


def test_nvfp4_experts_are_packed(vllm):
    codes = [torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8) for n, k in SHAPES]
    scales = [torch.rand(EXPERTS, n, k // 16).add(0.5).to(torch.float8_e4m3fn) for n, k in SHAPES]
    factors = [torch.rand(EXPERTS) for _ in SHAPES]
    w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2 = vllm.nvfp4.prepare_nvfp4_moe_layer_for_marlin(
        layer=layer(), w13=codes[0], w13_scale=scales[0], w13_scale_2=factors[0], w2=codes[1],
        w2_scale=scales[1], w2_scale_2=factors[1], is_act_and_mul=True,
    )  # fmt: skip
    spec = importlib.import_module("scalegate.layouts.formats.nvfp4")
    ours = ((w13, w13_scale, w13_scale_2), (w2, w2_scale, w2_scale_2))
    for which, (words, scale_words, factor) in enumerate(ours):
        for expert in range(EXPERTS):
            n, k = SHAPES[which]
            tensors = codes[which][expert], scales[which][expert], factors[which][expert]
            weight = spec.NVFP4Weight(spec.NVFP4(), *tensors).dequantize(torch.float64)
            packed = nvfp4.reference_weight(words[expert], scale_words[expert])[:n, :k].double()
            torch.testing.assert_close(packed * factor[expert].double(), weight, rtol=1e-6, atol=0)
    assert torch.equal(w13_scale_2, factors[0] * FACTOR)


def test_layers_alike_are_compiled_and_told_once(vllm):
    for _ in range(3):
        process_int4(vllm, layer(), *int4_checkpoint(False)[:3])
    assert not vllm.warmed, "vLLM need not wait for the compiler yet"
    vllm.warm_up_pending()
    assert len(vllm.warmed) == len(vllm.ahead) == 1
    assert vllm.log == [
        f"scalegate-kernels serves int4 g{GROUP} sym 256x256 bfloat16 (3 experts, top 2): faster"
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"activation": "gelu"}, "SiLU"),
        ({"swiglu_limit": 7.0}, "clamped"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"moe_backend": "marlin"}, "--moe-backend"),
        ({"moe_parallel_config": SimpleNamespace(use_ep=True)}, "expert parallelism"),
        ({"apply_router_weight_on_input": True}, "router"),
    ],
)
def test_layers_of_another_kind_are_marlins_with_a_line(vllm, fields, reason):
    words, scales, zeros, _ = int4_checkpoint(False)
    made = layer(**fields)
    found = process_int4(vllm, made, words, scales, zeros)
    assert found[:4] == ("marlin", made, 4, words[0])
    [line] = vllm.log
    assert "leaves" in line and reason in line


@pytest.mark.parametrize(
    "fields", [{"bits": 8}, {"actorder": "group"}, {"bias": torch.zeros(EXPERTS, 2 * INNER)}]
)
def test_weights_of_another_kind_are_marlins(vllm, fields):
    found = process_int4(vllm, layer(), *int4_checkpoint(False)[:3], **fields)
    assert found[0] == "marlin"


def test_experts_that_would_be_slower_or_are_disabled_are_marlins(vllm):
    vllm.envs.VLLM_DISABLED_KERNELS = ["ScalegateExperts"]
    assert process_int4(vllm, layer(), *int4_checkpoint(False)[:3])[0] == "marlin"
    vllm.envs.VLLM_DISABLED_KERNELS = []
    vllm.decision = importlib.import_module("scalegate.vllm_plugin.speed").Decision(False, "0.90 times")
    assert process_int4(vllm, layer(), *int4_checkpoint(False)[:3])[0] == "marlin"
    assert "0.90 times" in vllm.log[-1]


def experts_of(vllm, scales, **fields):
    quantization = {"use_nvfp4_w4a16": False, "block_shape": [0, GROUP], "g1_alphas": None, "g2_alphas": None}
    config = SimpleNamespace(**{**quantization, **fields}, w1_scale=scales[0], w2_scale=scales[1])
    return vllm.experts.ScalegateExperts(layer().moe_config, config)


def test_marlins_layers_are_multiplied_by_marlin_and_ours_by_ours(vllm, monkeypatch):
    """Which is which shows the weight's shape: `apply` gets nothing else that differs."""
    x, output = torch.zeros(5, HIDDEN), torch.zeros(5, HIDDEN)
    share, expert = torch.ones(5, TOP_K), torch.zeros(5, TOP_K, dtype=torch.int64)
    marlin = torch.zeros(EXPERTS, 2, 2)
    made = experts_of(vllm, (None, None))
    made.apply(output, x, marlin, marlin, share, expert)
    assert output.eq(1).all()
    assert made.moe_problem_size(x, marlin, marlin, expert) == "marlin's size"

    words, scales, zeros, _ = int4_checkpoint(False)
    found = process_int4(vllm, layer(), words, scales, zeros)
    called = []
    monkeypatch.setattr(vllm.experts.Products, "multiply", lambda *arguments: called.append(arguments))
    made = experts_of(vllm, found[2:4])
    assert made.moe_problem_size(x, *found[:2], expert) == (EXPERTS, 5, INNER, HIDDEN, TOP_K)
    made.apply(output, x, *found[:2], share, expert, workspace13="first", workspace2="second")
    [(products, rows, of_token, weight, scratch, out)] = called
    assert (products.words, products.scale_words) == (found[:2], found[2:4])
    assert (products.hidden, products.inner, products.spec.group_size) == (HIDDEN, INNER, GROUP)
    assert rows is x and weight is share and out is output and scratch == ("first", "second")
    assert of_token.dtype == torch.int32
