"""INT8 weights and inputs (W8A8): inputs rounded token by token, read back bit for bit, read by others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from scalegate.base.batch_invariance import INVARIANCE_MODES
from scalegate.layouts.choosing.choose import default_layout
from scalegate.layouts.formats.int8 import INT8_INPUTS, PER_TOKEN, WHOLE_ROW, Int8, Int8Weight
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Experts, PackedWeight, Problem, emulates_inputs
from scalegate.layouts.packing.peers.int_mm import MOST_COLUMNS, CpuInt8Inputs
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.declared import stored_weights
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.quantizers.int8_least_squares import quantize_int8
from scalegate.tests.pipeline.transformers_reader import read_by_both
from scalegate.tests.rounding_bounds import rounded, summed
from torch.nn import functional

NAME = "model.layers.0.self_attn.q_proj"
MODULES = 28
SPEC = Int8(WHOLE_ROW, INT8_INPUTS)


@pytest.fixture(scope="module")
def artifact(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w8a8") / "out"
    quantize(example_checkpoint, "int8-w8a8", folder, progress=False)
    return folder


def test_inputs_err_by_half_a_step_and_each_token_by_its_own() -> None:
    x = torch.randn(9, 384) * torch.logspace(-3, 3, 9)[:, None]
    step = x.abs().amax(1, keepdim=True) / 127
    error = (PER_TOKEN.round(x) - x).abs()
    assert bool((error <= step * (0.5 + 2.0**-16)).all()) and bool((error > 0.45 * step).any())
    codes, scale = PER_TOKEN.codes(x)
    assert codes.dtype is torch.int8 and torch.equal(
        codes.abs().amax(1), torch.full((9,), 127).to(torch.int8)
    )
    assert torch.equal(scale, step)
    half = x.bfloat16()
    assert torch.equal(PER_TOKEN.round(half)[3:4], PER_TOKEN.round(half[3:4].clone()))
    assert torch.equal(PER_TOKEN.round(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("layout", ["cpu_int8_inputs", "cpu_emulated", "emulated"])
def test_products_are_those_of_codes(layout: str) -> None:
    weight, x = SPEC.random(48, 388, torch.device("cpu")), torch.randn(9, 388)
    codes, scale = PER_TOKEN.codes(x)
    exact = (codes.long() @ weight.codes.long().T).double() * scale.double() * weight.scale.double().T
    y = LAYOUTS[layout].matmul(x, LAYOUTS[layout].pack(weight, torch.float32)).double()
    # A code times its scale is rounded on both sides; sums are float32's.
    assert float((y - exact).norm() / exact.norm()) <= 2 * rounded(torch.float32) + summed(388)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_of_a_token_depend_on_no_other(dtype: torch.dtype) -> None:
    layout = LAYOUTS["cpu_int8_inputs"]
    weight, x = SPEC.random(64, 4096, torch.device("cpu")), torch.randn(70, 4096).to(dtype)
    packed = layout.pack(weight, dtype)
    whole = layout.matmul(x, packed)
    assert all(torch.equal(layout.matmul(x[:m], packed), whole[:m]) for m in (1, 2, 16, 33))


def test_the_largest_sums_are_exact_and_larger_ones_refused() -> None:
    layout, problem = (
        LAYOUTS["cpu_int8_inputs"],
        Problem(SPEC, 8, MOST_COLUMNS, torch.float32, torch.device("cpu")),
    )
    assert layout.refuses(problem) is None
    assert layout.refuses(replace(problem, k=MOST_COLUMNS + 1)) == "sums at most 131072 columns in int32"
    codes = torch.full((8, MOST_COLUMNS), -128, dtype=torch.int8)
    packed = layout.pack(Int8Weight(SPEC, codes, torch.ones(8, 1)), torch.float32)
    # Codes of -127, times 1/127, which float32 rounds.
    y = layout.matmul(-torch.ones(1, MOST_COLUMNS), packed)
    assert y.allclose(torch.tensor(128.0 * MOST_COLUMNS), rtol=2 * rounded(torch.float32), atol=0)


def test_a_cpu_multiplies_codes_in_every_mode_and_for_experts() -> None:
    for mode in INVARIANCE_MODES:
        problem = Problem(SPEC, 48, 384, torch.bfloat16, torch.device("cpu"), batch_invariance=mode)
        assert default_layout(problem) == "cpu_int8_inputs" and not emulates_inputs(
            LAYOUTS["cpu_int8_inputs"]
        )
        assert default_layout(replace(problem, experts=Experts(4, 2))) == "cpu_int8_inputs_per_expert"
    weights_alone = Problem(Int8(), 48, 384, torch.bfloat16, torch.device("cpu"))
    assert LAYOUTS["cpu_int8_inputs"].refuses(weights_alone) == "is for INT8 with INT8 inputs"


def test_an_artifact_comes_back_as_it_was_written(artifact: Path, example_checkpoint: Path) -> None:
    section = json.loads((artifact / "config.json").read_text())["quantization_config"]
    group = section["config_groups"]["group_0"]
    assert (section["format"], group["weights"]["strategy"]) == ("int-quantized", "channel")
    inputs = group["input_activations"]
    assert (inputs["type"], inputs["strategy"], inputs["dynamic"]) == ("int", "token", True)
    stored = stored_weights(open_checkpoint(artifact))
    assert len(stored) == MODULES and all(weight.spec == SPEC for weight in stored.values())
    trained = open_checkpoint(example_checkpoint).read(f"{NAME}.weight")
    expected = quantize_int8(trained, SPEC).weight
    found = stored[NAME].read()
    # compressed-tensors' own shapes: a scale [N] would be multiplied by columns.
    assert open_checkpoint(artifact).tensors[f"{NAME}.weight_scale"].shape == (len(found.codes), 1)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scale, expected.scale)
    loaded = load_model(artifact, progress=False)
    assert set(loaded.layouts.values()) == {"cpu_int8_inputs"} and len(loaded.layouts) == MODULES * 4 // 7
    layers = {layer for layer in loaded.model.modules() if isinstance(layer, QuantizedLinear)}
    assert all(layer.input_format is PER_TOKEN for layer in layers)


def test_int8_of_weights_alone_is_written_as_before(example_checkpoint: Path, tmp_path: Path) -> None:
    quantize(example_checkpoint, "int8", tmp_path / "out", progress=False)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["format"] == "pack-quantized"
    assert section["config_groups"]["group_0"]["input_activations"] is None


def test_inputs_in_int8_go_with_whole_rows_alone() -> None:
    with pytest.raises(ValueError, match="`activations: int8` needs `group_size: -1`"):
        Int8(128, INT8_INPUTS)
    with pytest.raises(ValueError, match="`activations` is one of unquantized, int8; not 'fp8'"):
        Int8(WHOLE_ROW, "fp8")


def test_compressed_tensors_decompresses_it_to_the_same_bits(artifact: Path) -> None:
    section = json.loads((artifact / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**section["config_groups"]["group_0"])
    checkpoint = open_checkpoint(artifact)
    for module, weight in stored_weights(checkpoint).items():
        tensors = {name.removeprefix(f"{module}."): checkpoint.read(name) for name in weight.tensors}
        theirs = IntQuantizationCompressor.decompress(tensors, scheme)["weight"]
        assert torch.equal(theirs, weight.read().dequantize(theirs.dtype))


def test_compressed_tensors_rounds_inputs_with_a_scale_a_256th_smaller(artifact: Path) -> None:
    section = json.loads((artifact / "config.json").read_text())["quantization_config"]
    inputs = QuantizationArgs(**section["config_groups"]["group_0"]["input_activations"])
    x = torch.randn(1, 9, 384)
    scale, zero = compute_dynamic_scales_and_zp(x, inputs, torch.nn.Linear(384, 8))
    assert torch.equal(scale, x.abs().amax(-1, keepdim=True) / 127.5) and not zero.any()
    theirs = fake_quantize(x, scale, zero, inputs)
    assert bool(((theirs - PER_TOKEN.round(x)).abs() <= scale).all())


def test_transformers_reads_every_tensor_and_differs_as_two_roundings_do(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unrounded(self: CpuInt8Inputs, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        return functional.linear(x, packed.tensors["codes"] * packed.tensors["scale"][:, None])

    ours, strayed = read_by_both(artifact)
    assert strayed == set()
    monkeypatch.setattr(CpuInt8Inputs, "matmul", unrounded)
    assert 0 < ours < 2 * read_by_both(artifact)[0]
