"""MXFP4: the best power of two for every 32 weights, read back bit for bit, read by others."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.mxfp4 import GROUP_SIZE, MXFP4, from_e8m0
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.declared import stored_weights
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.quantizers.mxfp4_least_squares import quantize_mxfp4

NAME = "model.layers.0.self_attn.q_proj"
MODULES = 28
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(scope="module")
def artifact(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "out"
    quantize(example_checkpoint, "mxfp4", folder, progress=False)
    return folder


def test_scales_are_the_powers_of_two_of_their_bytes() -> None:
    scale = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(from_e8m0(scale), torch.ldexp(torch.ones(255), torch.arange(255) - 127))


def test_no_power_of_two_serves_a_group_better(example_checkpoint: Path) -> None:
    trained = open_checkpoint(example_checkpoint).read(f"{NAME}.weight").float()
    found = quantize_mxfp4(trained, MXFP4())
    groups = trained.unflatten(1, (-1, GROUP_SIZE))
    errors = (found.weight.dequantize(torch.float32).unflatten(1, (-1, GROUP_SIZE)) - groups).square().sum(-1)
    for exponent in range(-20, 4):
        step = 2.0**exponent
        nearest = VALUES[((groups.abs() / step)[..., None] - VALUES).abs().argmin(-1)] * step
        others = (nearest - groups.abs()).square().sum(-1)
        assert bool((errors <= others * (1 + 2.0**-18)).all()), exponent
    assert found.squared_error == pytest.approx(float(errors.double().sum()), rel=2.0**-18)


def test_zeros_and_extremes_stay_finite() -> None:
    weight = torch.zeros(4, 64)
    weight[1], weight[2], weight[3] = 1e-38, 3e38, -1.0
    values = quantize_mxfp4(weight, MXFP4()).weight.dequantize(torch.float32)
    assert torch.equal(values[0], weight[0]) and torch.equal(values[3], weight[3])
    # One bit of mantissa: half a step is a quarter of the power of two below.
    assert bool(((values - weight).abs() <= 2.0**-2 * weight.abs())[1:].all())


def test_an_artifact_comes_back_as_it_was_written(artifact: Path, example_checkpoint: Path) -> None:
    section = json.loads((artifact / "config.json").read_text())["quantization_config"]
    group = section["config_groups"]["group_0"]
    assert (section["format"], group["weights"]["group_size"]) == ("mxfp4-pack-quantized", 32)
    assert group["weights"]["scale_dtype"] == "torch.uint8" and group["input_activations"] is None
    stored = stored_weights(open_checkpoint(artifact))
    assert len(stored) == MODULES and all(weight.spec == MXFP4() for weight in stored.values())
    trained = open_checkpoint(example_checkpoint).read(f"{NAME}.weight")
    expected = quantize_mxfp4(trained, MXFP4()).weight
    assert torch.equal(stored[NAME].read().dequantize(), expected.dequantize())
    assert torch.equal(expected.dequantize().float(), expected.dequantize(torch.float32)), "exact in bf16"
    assert len(load_model(artifact, progress=False).layouts) == MODULES * 4 // 7


def test_a_scale_that_is_no_number_is_refused(artifact: Path, tmp_path: Path) -> None:
    for file in artifact.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{NAME}.weight_scale"][0, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"{NAME}.weight_scale holds NaN"):
        load_model(tmp_path, progress=False)


def test_compressed_tensors_decompresses_it_to_the_same_bits(artifact: Path) -> None:
    section = json.loads((artifact / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**section["config_groups"]["group_0"])
    checkpoint = open_checkpoint(artifact)
    for module, weight in stored_weights(checkpoint).items():
        tensors = {name.removeprefix(f"{module}."): checkpoint.read(name) for name in weight.tensors}
        theirs = MXFP4PackedCompressor.decompress(tensors, scheme)["weight"]
        assert torch.equal(theirs, weight.read().dequantize(theirs.dtype))
