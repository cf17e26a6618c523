"""vLLM's layers through the plugin's kernels: each checkpoint's product, by a layout that a CPU can run."""

import importlib
import weakref
from dataclasses import replace

import pytest
import torch
from scalegate.layouts.formats.weight_format import Weight
from scalegate.layouts.packing.layout import PackedWeight
from scalegate.tests.vllm_plugin import stand_in
from scalegate.tests.vllm_plugin.stand_in import TYPES, Parameter
from scalegate.tests.vllm_plugin.test_stored import words_of
from torch import nn

N, K, GROUP = 64, 256, 64
TOLERANCE = 2**-7
"""bf16 has eight bits of mantissa: the weight, x and y are rounded once each, and K sums average out."""


class DequantizingLayout:
    """Stands for the Hopper layouts, which no CPU runs: the weight in the activations' type."""

    name = "swap_ab"
    batch_invariant = False

    def __init__(self):
        self.packing = self
        self.refusal: str | None = None

    def refuses(self, problem) -> str | None:
        return self.refusal

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        tensors = {"weight": weight.dequantize(dtype)}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors, {"group_size": 1})

    def operand(self, packed):
        return packed.tensors["weight"]

    def multiply(self, x, weight, n):
        return x @ weight.T


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, with the plugin registered and every shape taken for faster."""
    found = stand_in.install(monkeypatch)
    found.layout = DequantizingLayout()
    module = {
        name: importlib.import_module(f"scalegate.vllm_plugin.{name}")
        for name in ("cache_key", "choice", "serving", "speed", "register", "product", "warm_up")
    }
    choice = module["choice"]
    monkeypatch.setattr(choice, "TUNED", dict.fromkeys(choice.TUNED, found.layout))
    found.invariant = DequantizingLayout()
    monkeypatch.setattr(choice, "INVARIANT", dict.fromkeys(choice.INVARIANT, found.invariant))
    monkeypatch.setattr(module["cache_key"], "SERVED", set())
    monkeypatch.setitem(choice.LAYOUTS, "swap_ab", found.layout)
    found.decision = module["speed"].Decision(True, "faster")
    monkeypatch.setattr(choice, "decide", lambda *arguments: found.decision)
    monkeypatch.setattr(choice.Gpu, "of", lambda device: choice.Gpu((9, 0), 132))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found.ahead = []
    monkeypatch.setattr(module["serving"], "compile_ahead", lambda *arguments: found.ahead.append(arguments))
    found.warmed = []
    monkeypatch.setattr(module["serving"], "warm_up", lambda *arguments: found.warmed.append(arguments))
    module["warm_up"].PENDING.clear()
    module["product"].kind_of.cache_clear()
    module["register"].register()
    return found


def config(weight_type="uint4b8", zero_points=False, group_size=GROUP, **fields):
    made = stand_in.MPLinearLayerConfig(
        (K, N), (K, N), TYPES[weight_type], torch.bfloat16, group_size, zero_points, has_g_idx=False
    )
    return replace(made, **fields)


def drawn(weight_type: str):
    """Codes, zero points, scales and the weight that they mean."""
    bits = 8 if weight_type.startswith("uint8") else 4
    codes = torch.randint(0, 1 << bits, (N, K))
    zero = torch.randint(0, 16, (N, K // GROUP)) if weight_type == "uint4" else 1 << (bits - 1)
    scale = torch.rand(N, K // GROUP).add(0.5).mul(0.01 * 16 / (1 << bits)).to(torch.bfloat16)
    spread = zero.repeat_interleave(GROUP, 1) if isinstance(zero, torch.Tensor) else zero
    return codes, zero, scale, (codes - spread) * scale.double().repeat_interleave(GROUP, 1), bits


def layer_of(weight_type: str, convention: str = "compressed-tensors"):
    """A layer as vLLM has loaded it: [N, K], as compressed-tensors stores it, or [K, N], as GPTQ does.

    Of AWQ's layers vLLM leaves weights and scales [K, N], and makes zero points [N, K].
    """
    gptq = convention != "compressed-tensors"
    codes, zero, scale, weight, bits = drawn(weight_type)
    layer = nn.Module()
    words, zeros = words_of(codes, bits), None
    n_first = {"input_dim": 1, "output_dim": 0}
    k_first = {"input_dim": 0, "output_dim": 1}
    if isinstance(zero, torch.Tensor):
        zeros = words_of(zero.t(), 4).t()
    if gptq:
        layer.w = Parameter(words.t().contiguous(), packed_dim=0, **k_first)
        layer.s = Parameter(scale.t().contiguous(), **k_first)
    else:
        layer.w = Parameter(words, packed_dim=1, **n_first)
        layer.s = Parameter(scale, **n_first)
    if zeros is not None and convention == "gptq":
        layer.z = Parameter(zeros.t().contiguous(), packed_dim=1, **k_first)
    elif zeros is not None:
        layer.z = Parameter(zeros.contiguous(), packed_dim=0, **n_first)
    return layer, weight


@pytest.mark.parametrize("convention", ["compressed-tensors", "gptq", "awq"])
@pytest.mark.parametrize("weight_type", ["uint4b8", "uint4", "uint8b128"])
def test_the_product_is_that_of_the_checkpoint(vllm, weight_type, convention):
    kernel_class = vllm.mixed[0]
    what = config(weight_type, zero_points=weight_type == "uint4")
    assert kernel_class.can_implement(what)[0]
    layer, weight = layer_of(weight_type, convention)
    kernel = kernel_class(what, "w", "s", "z" if what.zero_points else None)
    kernel.process_weights_after_loading(layer)
    assert layer.w.numel() == layer.s.numel() == 0, "the checkpoint's tensors are freed"
    x, bias = torch.randn(2, 3, K).to(torch.bfloat16), torch.randn(N).to(torch.bfloat16)
    y = kernel.apply_weights(layer, x, bias)
    expected = x.double() @ weight.T + bias.double()
    assert y.shape == (2, 3, N)
    assert (y.double() - expected).norm() / expected.norm() < TOLERANCE
    without = kernel.apply_weights(layer, x)
    assert torch.equal(without + bias, y)


def test_a_weight_is_made_ready_once_and_freed_with_its_layer(vllm):
    layer, _ = layer_of("uint4b8")
    kernel = vllm.mixed[0](config(), "w", "s")
    kernel.process_weights_after_loading(layer)
    made = []
    vllm.layout.operand = lambda packed: made.append(packed.tensors["weight"]) or made[-1]
    for m in (1, 2):
        kernel.apply_weights(layer, torch.ones(m, K, dtype=torch.bfloat16))
    [weight] = made
    assert weight.data_ptr() == layer.scalegate_weight.data_ptr()
    gone = weakref.ref(weight)
    made.clear()
    vllm.warmed.clear()
    del layer, weight
    assert gone() is None


def test_the_log_names_a_shape_once_and_all_of_it_is_warmed_up_once(vllm):
    for _ in range(3):
        layer, _ = layer_of("uint4b8")
        kernel = vllm.mixed[0](config(), "w", "s")
        kernel.process_weights_after_loading(layer)
    assert not vllm.warmed, "vLLM need not wait for the compilers yet"
    for m in (1, 2):
        kernel.apply_weights(layer, torch.ones(m, K, dtype=torch.bfloat16))
    assert vllm.log == ["scalegate-kernels serves int4 g64 sym 64x256 bfloat16: faster"]
    assert len(vllm.warmed) == len(vllm.ahead) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"has_g_idx": True}, "g_idx"),
        ({"weight_type": TYPES["uint8"]}, "uint8"),
        ({"weight_type": TYPES["uint4"]}, "zero points"),
        ({"zero_points": True}, "zero points"),
        ({"group_size": 24}, "group_size"),
        ({"out_type": torch.float16}, "float16"),
    ],
)
def test_a_layer_of_another_kind_is_left_to_vllm_with_a_line(vllm, fields, reason):
    can, told = vllm.mixed[0].can_implement(config(**fields))
    assert not can
    assert reason in told
    [line] = vllm.log
    assert "leaves" in line and reason in line


def test_a_layer_that_would_be_slower_is_left_to_vllm(vllm):
    speed = importlib.import_module("scalegate.vllm_plugin.speed")
    vllm.decision = speed.Decision(False, "0.90 times as fast")
    assert vllm.mixed[0].can_implement(config()) == (False, "0.90 times as fast")


def test_batch_invariance_takes_the_invariant_product_whatever_its_speed(vllm):
    speed = importlib.import_module("scalegate.vllm_plugin.speed")
    vllm.decision = speed.Decision(False, "0.90 times as fast")
    vllm.envs.VLLM_BATCH_INVARIANT = True
    vllm.layout.refusal = "is not batch-invariant"
    assert vllm.mixed[0].can_implement(config()) == (True, "batch-invariant")
    vllm.invariant.refusal = "does not run here"
    other = config(partition_weight_shape=(K, 2 * N))
    assert vllm.mixed[0].can_implement(other) == (False, "does not run here")


def test_two_micro_batches_at_once_are_left_to_vllm(vllm):
    """They would run one layer on two streams, which share its semaphores."""
    vllm.config.parallel_config.use_ubatching = True
    can, told = vllm.mixed[0].can_implement(config())
    assert not can
    assert "micro-batches" in told


def test_a_kernel_that_does_not_compile_is_left_to_vllm(vllm):
    vllm.layout.refusal = "does not run with Triton 9.9"
    assert vllm.mixed[0].can_implement(config()) == (False, "does not run with Triton 9.9")


def nvfp4_layer():
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randint(0, 256, (N, K // 2), dtype=torch.uint8), requires_grad=False)
    scale = torch.rand(N, K // 16).add(0.5).to(torch.float8_e4m3fn)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    layer.weight_global_scale = nn.Parameter(torch.tensor(0.01), requires_grad=False)
    layer.output_size_per_partition, layer.input_size_per_partition = N, K
    layer.params_dtype = torch.bfloat16
    return layer


def test_nvfp4(vllm):
    formats = importlib.import_module("scalegate.layouts.formats.nvfp4")
    layer = nvfp4_layer()
    spec, tensors = formats.NVFP4(), (layer.weight.data, layer.weight_scale.data, torch.tensor(0.01))
    weight = formats.NVFP4Weight(spec, *tensors).dequantize(torch.float64)
    kernel = vllm.fp4[1]()
    kernel.process_weights_after_loading(layer)
    x = torch.randn(5, K).to(torch.bfloat16)
    y, expected = kernel.apply_weights(layer, x), x.double() @ weight.T
    assert (y.double() - expected).norm() / expected.norm() < TOLERANCE


@pytest.mark.parametrize("why", ["slower", "disabled", "backend"])
def test_nvfp4_that_is_not_ours_is_marlins(vllm, why):
    if why == "backend":
        vllm.config.kernel_config.linear_backend = "marlin"
    elif why == "disabled":
        vllm.envs.VLLM_DISABLED_KERNELS = ["ScalegateNvFp4LinearKernel"]
    else:
        vllm.decision = importlib.import_module("scalegate.vllm_plugin.speed").Decision(False, "slower")
    layer = nvfp4_layer()
    kernel = vllm.fp4[1]()
    kernel.process_weights_after_loading(layer)
    assert layer.packed_by == "marlin"
    assert kernel.apply_weights(layer, torch.randn(1, K)) == "marlin's product"
