"""SGLang's INT4 layers go through our products where these are faster; all else stays SGLang's own."""

import importlib

import pytest
import torch
from scalegate.tests.sglang_plugin import stand_in
from scalegate.tests.vllm_plugin.test_linear import (
    GROUP,
    TOLERANCE,
    DequantizingLayout,
    K,
    N,
    drawn,
)
from scalegate.tests.vllm_plugin.test_stored import words_of
from torch import nn


def register() -> None:
    importlib.import_module("scalegate.sglang_plugin.register").register()


@pytest.fixture
def sglang(monkeypatch):
    """The stand-in, with the plugin registered and every shape taken for faster."""
    monkeypatch.delenv("SCALEGATE_KERNELS", raising=False)
    found = stand_in.install(monkeypatch)
    module = {
        name: importlib.import_module(f"scalegate.vllm_plugin.{name}")
        for name in ("choice", "speed", "product", "warm_up")
    }
    choice = module["choice"]
    found.layout, found.invariant = DequantizingLayout(), DequantizingLayout()
    monkeypatch.setattr(choice, "TUNED", dict.fromkeys(choice.TUNED, found.layout))
    monkeypatch.setattr(choice, "INVARIANT", dict.fromkeys(choice.INVARIANT, found.invariant))
    monkeypatch.setitem(choice.LAYOUTS, "swap_ab", found.layout)
    found.decision = module["speed"].Decision(True, "faster")
    monkeypatch.setattr(choice, "decide", lambda *arguments: found.decision)
    monkeypatch.setattr(choice.Gpu, "of", lambda device: choice.Gpu((9, 0), 132))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    module["warm_up"].PENDING.clear()
    module["product"].kind_of.cache_clear()
    register()
    found.apply_hooks()
    linear = importlib.import_module("scalegate.sglang_plugin.int_linear")
    monkeypatch.setattr(linear, "GPU", "cpu")
    monkeypatch.setattr(linear, "logger", importlib.import_module("scalegate.sglang_plugin.register").logger)
    found.ahead, found.warmed = [], []
    monkeypatch.setattr(linear, "compile_ahead", lambda *arguments: found.ahead.append(arguments))
    monkeypatch.setattr(linear, "warm_up", lambda *arguments: found.warmed.append(arguments))
    return found


def config(bits=4, zero_points=False, group_size=GROUP, has_g_idx=False):
    return stand_in.MarlinLinearLayerConfig(
        (K, N), (K, N), stand_in.TYPES[bits], torch.bfloat16, group_size, zero_points, has_g_idx
    )


def loaded(weight_type="uint4b8"):
    """A layer as SGLang has loaded it, and the weight that it means."""
    codes, zero, scale, weight, bits = drawn(weight_type)
    layer = nn.Module()
    layer.weight_packed = nn.Parameter(words_of(codes, bits), requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    if isinstance(zero, torch.Tensor):
        zeros = words_of(zero.t(), 4).t().contiguous()
        layer.weight_zero_point = nn.Parameter(zeros, requires_grad=False)
    return layer, weight


@pytest.mark.parametrize("weight_type", ["uint4b8", "uint4"])
def test_the_product_is_that_of_the_checkpoint(sglang, weight_type):
    layer, weight = loaded(weight_type)
    scheme = sglang.scheme(config(zero_points=weight_type == "uint4"))
    scheme.process_weights_after_loading(layer)
    assert layer.weight_packed.numel() == layer.weight_scale.numel() == 0, (
        "the checkpoint's tensors are freed"
    )
    x, bias = torch.randn(2, 3, K).to(torch.bfloat16), torch.randn(N).to(torch.bfloat16)
    y = scheme.apply_weights(layer, x, bias=bias)
    expected = x.double() @ weight.T + bias.double()
    assert (y.double() - expected).norm() / expected.norm() < TOLERANCE
    assert not hasattr(layer, "packed_by")


def test_a_shape_is_named_and_warmed_up_once(sglang):
    for _ in range(3):
        layer, _ = loaded()
        scheme = sglang.scheme(config())
        scheme.process_weights_after_loading(layer)
    assert len(sglang.log) == len(sglang.ahead) == 1 and not sglang.warmed
    assert sglang.log[0].startswith("scalegate-kernels serves int4 g64 sym 64x256 bfloat16: faster")
    for m in (1, 2):
        scheme.apply_weights(layer, torch.ones(m, K, dtype=torch.bfloat16))
    assert len(sglang.warmed) == 1


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (config(bits=8), "weights of 8 bits"),
        (config(has_g_idx=True), "g_idx"),
        (config(group_size=48), "48"),
    ],
    ids=["8 bits", "g_idx", "group"],
)
def test_what_there_is_no_kernel_for_is_left_to_sglang(sglang, what, told):
    layer, _ = loaded()
    scheme = sglang.scheme(what)
    scheme.process_weights_after_loading(layer)
    assert layer.packed_by == "marlin"
    assert scheme.apply_weights(layer, torch.ones(1, K), bias=None) == "marlin's product"
    [line] = sglang.log
    assert line.startswith("scalegate-kernels leaves ") and told in line


def test_a_slower_shape_is_left_to_sglang(sglang):
    sglang.decision = importlib.import_module("scalegate.vllm_plugin.speed").Decision(False, "slower")
    layer, _ = loaded()
    scheme = sglang.scheme(config())
    scheme.process_weights_after_loading(layer)
    assert scheme.apply_weights(layer, torch.ones(1, K)) == "marlin's product"


def test_two_micro_batches_at_once_are_left_to_sglang(sglang):
    sglang.server.enable_two_batch_overlap = True
    layer, _ = loaded()
    sglang.scheme(config()).process_weights_after_loading(layer)
    assert layer.packed_by == "marlin"


def test_deterministic_inference_has_the_invariant_layout(sglang):
    sglang.server.enable_deterministic_inference = True
    sglang.decision = importlib.import_module("scalegate.vllm_plugin.speed").Decision(False, "slower")
    layer, _ = loaded()
    packed, pack = [], sglang.invariant.pack
    sglang.invariant.pack = lambda *arguments: packed.append(arguments) or pack(*arguments)
    sglang.scheme(config()).process_weights_after_loading(layer)
    assert len(packed) == 1 and not hasattr(layer, "packed_by")


def test_a_cpu_is_left_alone(sglang, monkeypatch):
    monkeypatch.setattr(importlib.import_module("scalegate.sglang_plugin.int_linear"), "GPU", "cuda")
    layer, _ = loaded()
    sglang.scheme(config()).process_weights_after_loading(layer)
    assert layer.packed_by == "marlin"
    assert "CUDA" in sglang.log[0]


@pytest.mark.parametrize(
    ("version", "variable", "told"),
    [("0.5.17", "1", "knows SGLang 0.5.16"), ("0.5.16", "0", "SCALEGATE_KERNELS=0")],
)
def test_it_steps_aside_with_one_line(monkeypatch, version, variable, told):
    monkeypatch.setenv("SCALEGATE_KERNELS", variable)
    found = stand_in.install(monkeypatch, version)
    register()
    assert found.hooks == {}
    [line] = found.log
    assert line.startswith("scalegate-kernels does not serve: ") and told in line


def test_an_sglang_without_hooks_is_left_alone(monkeypatch):
    monkeypatch.delenv("SCALEGATE_KERNELS", raising=False)
    found = stand_in.install(monkeypatch)
    module = importlib.import_module("sglang.srt.plugins.hook_registry")
    monkeypatch.delattr(module, "HookRegistry")
    register()
    [line] = found.log
    assert "ImportError" in line
