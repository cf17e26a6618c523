"""FP8, and INT4 with FP8 inputs: the best scales, read back bit for bit, read by others."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.formats.e4m3 import E4M3, PER_TOKEN
from scalegate.layouts.formats.fp8 import BLOCKS, FP8, SCALES, TENSOR, FP8Weight, to_blocks, to_rows
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.declared import stored_weights
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.quantizers.fp8_least_squares import (
    quantize_fp8,
    quantize_fp8_blocks,
    shared_scale,
)
from scalegate.pipeline.quantization.shards import weight_tensors
from scalegate.pipeline.quantization.solvers import column_sums
from scalegate.pipeline.records.artifact import MANIFEST_NAME
from scalegate.pipeline.records.recipe import Recipe
from scalegate.tests.pipeline.transformers_reader import read_by_both

LAYER = "model.layers.0"
W4A16, W4A8 = Int4(symmetric=True), Int4(symmetric=True, activations="fp8")
MODULES = 28
TOKENS = torch.arange(3, 67)[None]


@pytest.fixture(scope="module")
def trained(example_checkpoint: Path) -> torch.Tensor:
    return open_checkpoint(example_checkpoint).read(f"{LAYER}.self_attn.q_proj.weight").float()


@pytest.fixture(scope="module")
def artifact(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "out"
    quantize(example_checkpoint, "fp8", folder, progress=False)
    return folder


def squared_errors(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp64 [N], with codes as torch rounds them."""
    codes = (weight / scale).clamp(-448, 448).to(E4M3)
    return (codes.double() * scale.double() - weight.double()).square().sum(1)


def test_each_row_has_a_better_scale_than_that_of_its_largest_weight(trained: torch.Tensor) -> None:
    found = quantize_fp8(trained, FP8(), torch.bfloat16, None).weight
    assert torch.equal(found.codes.float(), (trained / found.scale.float()).clamp(-448, 448).to(E4M3).float())
    errors = squared_errors(trained, found.scale.float())
    largest = (trained.abs().amax(1, keepdim=True) / 448).bfloat16().float()
    assert bool((errors <= squared_errors(trained, largest)).all())
    assert float(errors.sum() / squared_errors(trained, largest).sum()) < 0.95
    # No clipping, and no step of the octave or of the next one, would have served a row better.
    base = trained.abs().amax(1, keepdim=True) / 448
    others = torch.stack(
        [squared_errors(trained, (base * 2.0 ** (i / 16)).bfloat16().float()) for i in range(-16, 32)]
    ).amin(0)
    # Errors are 2^-11 of a row's square, and are told apart by sums in float32, of 2^-24 of it.
    assert bool((errors <= others * (1 + 2.0**-10)).all())


def test_the_bits_depend_on_no_block(trained: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize_fp8(trained, FP8(), torch.bfloat16, None).weight
    monkeypatch.setattr(column_sums, "CPU_CHUNK", 1)
    parts = [quantize_fp8(rows, FP8(), torch.bfloat16, None).weight for rows in trained.split(7)]
    assert torch.equal(whole.codes.view(torch.uint8), torch.cat([p.codes.view(torch.uint8) for p in parts]))
    assert torch.equal(whole.scale, torch.cat([part.scale for part in parts]))


def test_rows_of_zeros_and_of_next_to_nothing_stay_finite() -> None:
    weight = torch.zeros(3, 64)
    weight[1], weight[2] = 1e-30, 1e30
    found = quantize_fp8(weight, FP8(), torch.bfloat16, None)
    values = found.weight.dequantize(torch.float32)
    assert torch.equal(values[0], weight[0])
    # Three bits of mantissa, whatever the scale is.
    assert bool(((values - weight).abs() <= 2.0**-4 * weight.abs()).all())


def test_an_artifact_comes_back_as_it_was_written_and_says_how_inputs_are_rounded(
    artifact: Path, trained: torch.Tensor
) -> None:
    section = json.loads((artifact / "config.json").read_text())["quantization_config"]
    group = section["config_groups"]["group_0"]
    assert (section["format"], group["weights"]["strategy"]) == ("float-quantized", "channel")
    inputs = group["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"], inputs["num_bits"]) == ("token", True, 8)
    stored = stored_weights(open_checkpoint(artifact))
    assert len(stored) == MODULES and all(weight.spec == FP8() for weight in stored.values())
    weight = stored[f"{LAYER}.self_attn.q_proj"]
    expected = quantize_fp8(trained, FP8(), torch.bfloat16, None).weight
    read = weight.read()
    assert isinstance(read, FP8Weight) and torch.equal(read.dequantize(), expected.dequantize())
    assert weight.read_input is not None and weight.read_input() == PER_TOKEN


def test_it_is_served_with_rounded_inputs_and_merged_products(artifact: Path) -> None:
    loaded = load_model(artifact, progress=False)
    assert set(loaded.layouts.values()) == {"cpu_emulated"}
    # Seven layers of a block in four products: q, k, v and gate, up round the same input alike.
    assert len(loaded.layouts) == MODULES * 4 // 7
    layers = {layer for layer in loaded.model.modules() if isinstance(layer, QuantizedLinear)}
    assert all(layer.input_format is PER_TOKEN for layer in layers)


def test_what_no_manifest_calls_a_release_is_a_source_of_16_bits(artifact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact, tmp_path / "source", ignore=shutil.ignore_patterns(MANIFEST_NAME))
    source = stored_weights(open_checkpoint(folder))
    assert not any(weight.is_quantized or weight.read_input for weight in source.values())
    released = stored_weights(open_checkpoint(artifact))
    name = f"{LAYER}.mlp.up_proj"
    assert torch.equal(source[name].read(), released[name].read().dequantize())
    with torch.inference_mode():
        wide, narrow = (
            load_model(each, progress=False, dtype=torch.float32).model(TOKENS).logits
            for each in (folder, artifact)
        )
    assert float((narrow - wide).norm() / wide.norm()) > 2.0**-8, "inputs were not rounded"


def test_one_scale_a_tensor_is_shared_by_what_is_merged(example_checkpoint: Path, tmp_path: Path) -> None:
    quantize(example_checkpoint, Recipe("tensor", spec=FP8(TENSOR)), tmp_path / "out", progress=False)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.tensors[f"{LAYER}.self_attn.q_proj.weight_scale"].shape == (1,)
    scales = [checkpoint.read(f"{LAYER}.self_attn.{name}_proj.weight_scale") for name in "qkv"]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[0], scales[2])
    source = open_checkpoint(example_checkpoint)
    largest = max(float(source.read(f"{LAYER}.self_attn.{n}_proj.weight").abs().max()) for n in "qkv")
    assert torch.equal(scales[0], shared_scale(largest)[None])
    assert len(load_model(checkpoint, progress=False).layouts) == MODULES * 4 // 7


def test_each_block_has_a_scale_of_its_own_however_its_rows_are_read(
    trained: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = trained[:200] * torch.logspace(-2, 2, 200)[:, None]
    found = quantize_fp8_blocks(weight, FP8(BLOCKS)).weight
    blocks = to_blocks(found.scale)
    assert blocks.shape == (2, weight.shape[1] // 128) and torch.equal(to_rows(blocks, 200), found.scale)
    # No other block matters.
    first = quantize_fp8_blocks(weight[:128, 128:], FP8(BLOCKS)).weight
    assert torch.equal(first.dequantize(), found.dequantize()[:128, 128:])
    # What is below the smallest subnormal's half of a block's scale is lost, and nothing else.
    spread = found.scale.repeat_interleave(128, 1)
    bound = torch.maximum(2.0**-4 * weight.abs(), 2.0**-10 * spread) * (1 + 2.0**-20)
    clipped = weight.abs() > 448 * spread
    error = (found.dequantize(torch.float32) - weight).abs()
    assert bool((error <= bound)[~clipped].all())
    monkeypatch.setattr(column_sums, "CPU_CHUNK", 1)
    assert torch.equal(quantize_fp8_blocks(weight, FP8(BLOCKS)).weight.scale, found.scale)


@pytest.mark.parametrize("export", [None, "compressed-tensors"])
def test_blocks_are_written_as_deepseek_or_compressed_tensors_has_them(
    example_checkpoint: Path, tmp_path: Path, export: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_tensors, "CPU_BLOCK", 1 << 15)  # less than 128 rows
    quantize(example_checkpoint, "fp8-block", tmp_path / "out", export=export, progress=False)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    checkpoint = open_checkpoint(tmp_path / "out")
    name = f"{LAYER}.self_attn.q_proj"
    scales = checkpoint.read(f"{name}.{'weight_scale_inv' if export is None else 'weight_scale'}")
    if export is None:
        assert (section["quant_method"], section["weight_block_size"]) == ("fp8", [128, 128])
        assert (section["activation_scheme"], section["modules_to_not_convert"]) == ("dynamic", ["lm_head"])
    else:
        group = section["config_groups"]["group_0"]
        assert (group["weights"]["strategy"], group["weights"]["block_structure"]) == ("block", [128, 128])
        assert (group["input_activations"]["strategy"], group["input_activations"]["group_size"]) == (
            "group",
            128,
        )
    source = open_checkpoint(example_checkpoint).read(f"{name}.weight")
    expected = quantize_fp8_blocks(source, FP8(BLOCKS)).weight
    assert torch.equal(scales, to_blocks(expected.scale)) and scales.dtype == torch.float32
    stored = stored_weights(checkpoint)
    assert torch.equal(stored[name].read().dequantize(), expected.dequantize())
    assert all(weight.spec == FP8(BLOCKS) for weight in stored.values()) and len(stored) == MODULES
    loaded = load_model(checkpoint, progress=False)
    assert set(loaded.layouts.values()) == {"cpu_emulated"} and len(loaded.layouts) == MODULES * 4 // 7
    (tmp_path / "out" / MANIFEST_NAME).unlink()
    plain = stored_weights(open_checkpoint(tmp_path / "out"))[name]
    assert not plain.is_quantized and torch.equal(plain.read(), expected.dequantize())


def test_deepseek_s_form_takes_blocks_alone(example_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fp8 is written in blocks of FP8 only"):
        quantize(example_checkpoint, "fp8", tmp_path / "out", export="fp8", progress=False)


def test_attention_in_fp8_goes_beside_nvfp4(example_checkpoint: Path, tmp_path: Path) -> None:
    quantize(example_checkpoint, "nvfp4-fp8", tmp_path / "out", progress=False)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["format"] == "mixed-precision"
    groups = {group["format"]: group for group in section["config_groups"].values()}
    assert set(groups) == {"float-quantized", "nvfp4-pack-quantized"}
    assert groups["nvfp4-pack-quantized"]["input_activations"] is None
    stored = stored_weights(open_checkpoint(tmp_path / "out"))
    assert len(stored) == MODULES
    for module, weight in stored.items():
        in_attention = ".self_attn." in module
        assert weight.spec == (FP8() if in_attention else NVFP4()), module
        assert (weight.read_input is not None) == in_attention
    layouts = load_model(tmp_path / "out", progress=False).layouts
    assert all((layout == "cpu_emulated") == ("self_attn" in name) for name, layout in layouts.items())


def test_int4_takes_fp8_inputs(example_checkpoint: Path, tmp_path: Path) -> None:
    quantize(example_checkpoint, "int4-fp8", tmp_path / "out", progress=False)
    group = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group = group["config_groups"]["group_0"]
    assert (group["format"], group["weights"]["num_bits"]) == ("pack-quantized", 4)
    assert (group["input_activations"]["type"], group["input_activations"]["strategy"]) == ("float", "token")
    stored = stored_weights(open_checkpoint(tmp_path / "out"))
    assert all(weight.spec == W4A8 and weight.read_input is not None for weight in stored.values())
    loaded = load_model(tmp_path / "out", progress=False)
    assert set(loaded.layouts.values()) == {"cpu_emulated"} and len(loaded.layouts) == MODULES * 4 // 7
    # The weights are INT4's own: only inputs differ.
    quantize(example_checkpoint, Recipe("w4a16", spec=W4A16), tmp_path / "plain", progress=False)
    plain = stored_weights(open_checkpoint(tmp_path / "plain"))
    for module, weight in stored.items():
        assert torch.equal(weight.read().dequantize(), plain[module].read().dequantize())
    with pytest.raises(UserError, match="torchao's INT4 is written with weights alone"):
        quantize(example_checkpoint, "int4-fp8", tmp_path / "torchao", export="torchao", progress=False)


def test_fp8_inputs_go_with_symmetric_int4_alone() -> None:
    with pytest.raises(ValueError, match="`activations: fp8` needs `symmetric: true`"):
        Int4(activations="fp8")
    with pytest.raises(ValueError, match="`activations` is one of unquantized, fp8; not 'int8'"):
        Int4(symmetric=True, activations="int8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", [*map(FP8, SCALES), W4A8], ids=lambda spec: spec.key)
def test_transformers_reads_it_and_rounds_inputs_as_we_do(
    example_checkpoint: Path, tmp_path: Path, spec: FP8 | Int4, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    quantize(example_checkpoint, Recipe("fp8", spec=spec), out, export="compressed-tensors", progress=False)
    error, strayed = read_by_both(out)
    # Float32 sums in another order may send an input to its other neighbour, a step of 2^-3 away.
    assert strayed == set() and error <= 2.0**-10
    monkeypatch.setattr(type(PER_TOKEN), "round", lambda self, x: x)
    assert read_by_both(out)[0] > 2.0**-8, "nothing was rounded"
