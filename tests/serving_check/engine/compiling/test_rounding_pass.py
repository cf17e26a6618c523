"""Products in FP8 take inputs that the kernel before them has rounded, in a layer and across layers.

Kernels are their definitions here, and graphs run as they are after the pass.
"""

import pytest
import torch
from scalegate.kernels.fp8 import fused_rounding
from scalegate.layouts.formats.e4m3 import PER_TOKEN
from scalegate.layouts.formats.fp8 import FP8, TENSOR
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.layouts.modules import rounded_inputs
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.modules.merged_linear import layers_with_one_input, merge_unquantized
from scalegate.layouts.packing import fp8_scaled
from scalegate.serving_check.engine.compiling import rounding_pass
from scalegate.serving_check.engine.compiling.compiled_layers import CompiledLayers, model_layers
from scalegate.serving_check.engine.compiling.cross_layer_fusion import fuse_across_layers
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from .test_cross_layer_fusion import make

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16}
OP = "scalegate."
TOKENS = 37
"""Of the traced pass."""


def quantize(model: nn.Module, spec: WeightFormat) -> None:
    for name, linear in [*model.named_modules()]:
        if type(linear) is nn.Linear and "lm_head" not in name:
            weight = spec.random(*linear.weight.shape, torch.device("cpu"))
            packed = fp8_scaled.FP8_SCALED.pack(weight, torch.bfloat16)
            model.set_submodule(name, QuantizedLinear(packed, None))


def codes_of(y: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = PER_TOKEN.codes(y)
    return codes, scales.t()


def multiply(codes: Tensor, scales: Tensor, weight: Tensor, w_scale: Tensor, _, dtype: torch.dtype) -> Tensor:
    return ((codes.float() * scales.t()) @ (weight.float() * w_scale.t()).t()).to(dtype)


@pytest.fixture(autouse=True)
def _definitions(monkeypatch: pytest.MonkeyPatch):
    def norm_and_round(x, residual, weight, eps, keeps):
        h, y = fused_rounding.norm_reference(x, residual, weight, eps)
        return h.clone() if residual is not None else h[:0].clone(), y if keeps else y[:0], *codes_of(y)

    monkeypatch.setattr(fused_rounding, "norm_and_round", norm_and_round)
    monkeypatch.setattr(
        fused_rounding, "silu_and_round", lambda x: codes_of(fused_rounding.silu_reference(x))
    )
    monkeypatch.setattr(rounded_inputs, "round_rows_kernel", codes_of)
    monkeypatch.setattr(fp8_scaled, "round_rows", lambda x, in_groups, scale: codes_of(x))
    monkeypatch.setattr(fp8_scaled, "matmul", multiply)
    monkeypatch.setattr(fp8_scaled.hopper_matmul, "serves", lambda *args: False)
    monkeypatch.setattr(fp8_scaled, "_suits_scaled_mm", lambda *args: False)
    monkeypatch.setattr(rounding_pass, "DEVICE", "cpu")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Our ops in each graph after the pass."""
    found: list[list[str]] = []
    compile_ = torch.compile

    def passed(module: torch.fx.GraphModule, inputs: list):
        sizes = [size for each in inputs if isinstance(each, Tensor) for size in each.shape]
        assert TOKENS not in [size for size in sizes if isinstance(size, int)], "compiled for one size"
        rounding_pass.round_in_place(module.graph)
        module.graph.lint()
        module.recompile()
        ops = [str(node.target) for node in module.graph.nodes if OP in str(node.target)]
        found.append([name.removeprefix(OP).removesuffix(".default") for name in ops])
        return module.forward

    backend = aot_autograd(
        fw_compiler=passed, inference_compiler=passed, decompositions=select_decomp_table()
    )

    def with_pass(function, **options):
        return compile_(function, backend=backend, fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", with_pass)
    torch._dynamo.reset()
    return found


def served(architecture: str, spec: WeightFormat):
    model, run = make(architecture, torch.bfloat16, **SIZES)
    merge_unquantized(model, layers_with_one_input(model, run))
    quantize(model, spec)
    return model, run


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_norms_and_silu_times_up_are_rounded_where_they_are_made(architecture: str, graphs: list):
    model, run = served(architecture, FP8())
    wanted, shorter = run().float(), run(21).float()
    chain = fuse_across_layers(model_layers(model), run)
    assert chain.rounds
    with CompiledLayers(model, chain):
        answer = run().float()
    layer = max(graphs, key=len)
    assert layer == [
        "packed_matmul_rounded", "packed_matmul",  # qkv takes what the layer before has rounded; o does not
        "norm_and_round", "packed_matmul_rounded",
        "silu_and_round", "packed_matmul_rounded",
        "norm_and_round",  # for the next layer
    ]  # fmt: skip
    # Inductor, too, rounds once where a module rounds twice.
    assert (answer - wanted).norm() < 0.03 * wanted.norm()
    assert (run(21).float() - shorter).norm() < 0.03 * shorter.norm()


def test_inputs_with_a_calibrated_scale_are_rounded_by_the_product(graphs: list):
    model, run = served("qwen3", FP8(TENSOR, "static"))
    chain = fuse_across_layers(model_layers(model), run)
    assert not chain.rounds
    with CompiledLayers(model, chain):
        run()
    assert {name for graph in graphs for name in graph} == {"packed_matmul"}


def test_a_norm_whose_result_others_need_too_is_also_written(graphs: list):
    model, run = served("qwen3", FP8())
    for layer in model.model.layers:
        layer.mlp.forward = lambda x, mlp=layer.mlp: type(mlp).forward(mlp, x) + x
    wanted = run().float()
    with CompiledLayers(model, fuse_across_layers(model_layers(model), run)):
        answer = run().float()
    assert max(graphs, key=len).count("norm_and_round") == 2
    assert (answer - wanted).norm() < 0.03 * wanted.norm()
