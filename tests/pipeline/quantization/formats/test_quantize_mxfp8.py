"""MXFP8: a power of two for every 32 weights and inputs, read back bit for bit, read by others."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.e4m3 import E4M3, E4M3_MAX
from scalegate.layouts.formats.mxfp4 import GROUP_SIZE, from_e8m0
from scalegate.layouts.formats.mxfp8 import MXFP8, PER_GROUP, MXFP8Input, scale_bytes
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.declared import stored_weights
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.quantizers.mxfp8_quantizer import quantize_mxfp8
from scalegate.pipeline.records.artifact import MANIFEST_NAME
from scalegate.tests.pipeline.transformers_reader import read_by_both

NAME = "model.layers.0.self_attn.q_proj"
MODULES = 28
EXPORTS = ("compressed-tensors", "modelopt")


@pytest.fixture(scope="module", params=EXPORTS)
def artifact(
    request: pytest.FixtureRequest, example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("mxfp8") / request.param
    quantize(example_checkpoint, "mxfp8", folder, export=request.param, progress=False)
    return folder


def section_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_scales_are_those_of_compressed_tensors_and_clip_nothing() -> None:
    largest = torch.cat([torch.randn(4096).abs() * 10.0**e for e in range(-20, 20)])
    largest = torch.cat([largest, torch.tensor([1.0, 1.75, 1.7499999, 448.0, 449.0])])
    assert torch.equal(scale_bytes(largest).float(), generate_mx_scales(largest, 8))
    assert bool((largest / from_e8m0(scale_bytes(largest)) <= E4M3_MAX).all())
    smaller = from_e8m0(scale_bytes(largest) - 1)
    assert bool((largest / smaller >= E4M3_MAX).all()), "a smaller power of two would do"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_err_by_half_a_step_of_the_format(dtype: torch.dtype) -> None:
    x = (torch.randn(8, 256) * torch.logspace(-6, 6, 256)).to(dtype)
    scale = from_e8m0(scale_bytes(x.float().unflatten(1, (-1, GROUP_SIZE)).abs().amax(-1)))
    spread = scale.repeat_interleave(GROUP_SIZE, 1)
    bound = torch.maximum(2.0**-4 * x.float().abs(), 2.0**-10 * spread)
    error = (PER_GROUP.round(x).float() - x.float()).abs()
    assert PER_GROUP.round(x).dtype is dtype
    assert bool((error <= bound).all()) and bool((error > 0.9 * bound).any())
    assert torch.equal(PER_GROUP.round(x)[3:4], PER_GROUP.round(x[3:4].clone()))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_extremes_stay_finite(value: float) -> None:
    x = torch.full((2, 64), value)
    rounded = PER_GROUP.round(x)
    assert bool(rounded.isfinite().all()) and bool((rounded <= x * (1 + 2.0**-3)).all())
    weight = quantize_mxfp8(x, MXFP8()).weight.dequantize(torch.float32)
    smallest = 2.0**-127 * 2.0**-9
    assert bool(weight.isfinite().all()) and bool((weight == 0).all()) == (value < smallest)


def test_no_power_of_two_serves_a_group_better(example_checkpoint: Path) -> None:
    trained = open_checkpoint(example_checkpoint).read(f"{NAME}.weight").float()
    found = quantize_mxfp8(trained, MXFP8())
    groups = trained.unflatten(1, (-1, GROUP_SIZE))
    errors = (found.weight.dequantize(torch.float32).unflatten(1, (-1, GROUP_SIZE)) - groups).square().sum(-1)
    for exponent in range(-24, 2):
        step = 2.0**exponent
        nearest = (groups / step).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float() * step
        others = (nearest - groups).square().sum(-1)
        assert bool((errors <= others * (1 + 2.0**-18)).all()), exponent
    assert found.squared_error == pytest.approx(float(errors.double().sum()), rel=2.0**-18)


def test_an_artifact_comes_back_as_it_was_written(artifact: Path, example_checkpoint: Path) -> None:
    group = section_of(artifact)["config_groups"]["group_0"]
    for part, dynamic in (("weights", False), ("input_activations", True)):
        assert (group[part]["num_bits"], group[part]["type"]) == (8, "float")
        assert (group[part]["group_size"], group[part]["dynamic"]) == (32, dynamic)
    if artifact.name == "modelopt":
        assert section_of(artifact)["quant_algo"] == "MXFP8"
        sidecar = json.loads((artifact / "hf_quant_config.json").read_text())["quantization"]
        assert (sidecar["quant_algo"], sidecar["group_size"]) == ("MXFP8", 32)
    else:
        assert section_of(artifact)["format"] == "mxfp8-quantized"
        assert group["weights"]["scale_dtype"] == "torch.uint8"
    stored = stored_weights(open_checkpoint(artifact))
    assert len(stored) == MODULES and all(weight.spec == MXFP8() for weight in stored.values())
    trained = open_checkpoint(example_checkpoint).read(f"{NAME}.weight")
    expected = quantize_mxfp8(trained, MXFP8()).weight
    assert torch.equal(stored[NAME].read().dequantize(), expected.dequantize())
    assert torch.equal(expected.dequantize().float(), expected.dequantize(torch.float32)), "exact in bf16"
    loaded = load_model(artifact, progress=False)
    assert set(loaded.layouts.values()) == {"cpu_emulated"} and len(loaded.layouts) == MODULES * 4 // 7
    layers = {layer for layer in loaded.model.modules() if isinstance(layer, QuantizedLinear)}
    assert all(layer.input_format is PER_GROUP for layer in layers)


def test_inputs_are_rounded_too_if_another_tool_names_no_type_of_zero_points(
    example_checkpoint: Path, tmp_path: Path
) -> None:
    """As llm-compressor 0.14 writes it."""
    folder = tmp_path / "out"
    quantize(example_checkpoint, "mxfp8", folder, progress=False)
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        group[part]["zp_dtype"] = None
    (folder / "config.json").write_text(json.dumps(config))
    stored = stored_weights(open_checkpoint(folder))
    assert len(stored) == MODULES and all(weight.spec == MXFP8() for weight in stored.values())
    assert all(weight.read_input and weight.read_input() is PER_GROUP for weight in stored.values())


def test_what_no_manifest_calls_a_release_is_a_source_of_16_bits(artifact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact, tmp_path / "source", ignore=shutil.ignore_patterns(MANIFEST_NAME))
    source = stored_weights(open_checkpoint(folder))
    assert len(source) == MODULES and not any(weight.is_quantized for weight in source.values())
    released = stored_weights(open_checkpoint(artifact))
    assert torch.equal(source[NAME].read(), released[NAME].read().dequantize())


def test_a_scale_that_is_no_number_is_refused(artifact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact, tmp_path / "spoilt")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{NAME}.weight_scale"][0, 0] = 255
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"{NAME}.weight_scale holds NaN"):
        load_model(folder, progress=False)


def test_both_conventions_store_what_compressed_tensors_decompresses_to_the_same_bits(
    artifact: Path,
) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights | {"scale_dtype": torch.uint8})
    checkpoint = open_checkpoint(artifact)
    for module, weight in stored_weights(checkpoint).items():
        tensors = {name.removeprefix(f"{module}."): checkpoint.read(name) for name in weight.tensors}
        theirs = MXFP8QuantizationCompressor.decompress(tensors, scheme)["weight"]
        assert torch.equal(theirs, weight.read().dequantize(theirs.dtype))


def test_transformers_reads_it_and_rounds_inputs_as_we_do(
    example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(example_checkpoint, "mxfp8", tmp_path / "out", progress=False)
    # It decompresses weights to bf16, and multiplies no float32 by them.
    wide = classmethod(lambda cls, scale: from_e8m0(scale))
    monkeypatch.setattr(MXFP8QuantizationCompressor, "_decompress_scale", wide)
    error, strayed = read_by_both(tmp_path / "out")
    # Float32 sums in another order may send an input to its other neighbour, a step of 2^-3 away.
    assert strayed == set() and error <= 2.0**-10
    monkeypatch.setattr(MXFP8Input, "round", lambda self, x: x)
    assert read_by_both(tmp_path / "out")[0] > 2.0**-8, "nothing was rounded"
