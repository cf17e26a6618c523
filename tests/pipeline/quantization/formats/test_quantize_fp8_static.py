"""FP8 with calibrated scales of inputs, in the forms of ModelOpt and of compressed-tensors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.e4m3 import E4M3, E4M3_MAX, E4M3StaticInput
from scalegate.layouts.formats.fp8 import BLOCKS, FP8, STATIC, TENSOR
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.declared import stored_weights
from scalegate.pipeline.model_loader import layer_stream
from scalegate.pipeline.model_loader.load_model import load_model, problems
from scalegate.pipeline.quantization.calibration import calibration_text
from scalegate.pipeline.quantization.quantizers.fp8_least_squares import scale_of_inputs
from scalegate.pipeline.records.artifact import MANIFEST_NAME
from scalegate.pipeline.records.recipe import Recipe, Rule
from scalegate.tests.pipeline.transformers_reader import read_by_both

LAYER = "model.layers.0"
QUERY, OUTPUT = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.o_proj"
SPEC = FP8(TENSOR, STATIC)
MODULES = 28
EXPORTS = ("compressed-tensors", "modelopt")


@pytest.fixture(autouse=True, scope="module")
def short() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_text, "SEQUENCES", 6)
        patch.setattr(calibration_text, "SEQUENCE_TOKENS", 64)
        patch.setattr(layer_stream, "SEQUENCES_AT_ONCE", 4)
        yield


@pytest.fixture(scope="module", params=EXPORTS)
def artifact(
    request: pytest.FixtureRequest,
    example_checkpoint: Path,
    heldout_text: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("static") / request.param
    options = {"export": request.param, "calibration": heldout_text, "progress": False}
    quantize(example_checkpoint, "fp8-static", folder, **options)
    return folder


def section_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("largest", [0.0, 1e-30, 448.0, 448.1, 3.0, 1e30])
def test_the_scale_of_inputs_is_the_least_power_of_two_that_reaches_them(largest: float) -> None:
    scale = float(scale_of_inputs(largest))
    assert scale > 0 and scale == 2.0 ** round(torch.tensor(scale).log2().item())
    assert scale * E4M3_MAX >= largest
    assert largest < 1e-20 or scale / 2 * E4M3_MAX < largest


def test_inputs_are_rounded_by_one_scale_and_held_exactly_by_16_bits() -> None:
    rounding = E4M3StaticInput(torch.tensor(0.25))
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).mul(40).bfloat16()
    meant = (x.float() / 0.25).clamp(-448, 448).to(E4M3).float() * 0.25
    assert torch.equal(rounding.round(x).float(), meant)
    assert float(rounding.round(x).abs().max()) == 112 < float(x.abs().max()), "the largest are clipped"
    assert torch.equal(rounding.round(x[:1]), rounding.round(x)[:1])


def test_an_artifact_says_what_its_form_calls_it(artifact: Path) -> None:
    section, group = section_of(artifact), section_of(artifact)["config_groups"]["group_0"]
    inputs = group["input_activations"]
    assert (inputs["num_bits"], inputs["type"], inputs["dynamic"]) == (8, "float", False)
    checkpoint = open_checkpoint(artifact)
    shapes = [tuple(checkpoint.tensors[f"{QUERY}.{n}"].shape) for n in ("weight_scale", "input_scale")]
    if artifact.name == "modelopt":
        assert section["quant_algo"] == "FP8" and shapes == [(), ()]
        sidecar = json.loads((artifact / "hf_quant_config.json").read_text())["quantization"]
        assert (sidecar["quant_algo"], sidecar["exclude_modules"]) == ("FP8", ["lm_head"])
    else:
        assert section["format"] == "float-quantized" and shapes == [(1,), (1,)]
        assert (group["weights"]["strategy"], inputs["strategy"]) == ("tensor", "tensor")


def test_it_is_read_back_and_served_in_merged_products(artifact: Path, example_checkpoint: Path) -> None:
    stored = stored_weights(open_checkpoint(artifact))
    assert len(stored) == MODULES and all(weight.spec == SPEC for weight in stored.values())
    scales = {name: weight.read_input() for name, weight in stored.items() if weight.read_input is not None}
    assert all(isinstance(scale, E4M3StaticInput) for scale in scales.values()) and len(scales) == MODULES
    assert scales[QUERY] == scales[QUERY.replace("q_proj", "v_proj")] != scales[OUTPUT]
    loaded = load_model(artifact, progress=False)
    layers = {layer for layer in loaded.model.modules() if isinstance(layer, QuantizedLinear)}
    assert len(layers) == len(loaded.layouts) == MODULES * 4 // 7
    assert all(isinstance(layer.input_format, E4M3StaticInput) for layer in layers)
    plain = load_model(example_checkpoint, progress=False).model
    tokens = torch.randint(0, 8192, (1, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = plain(tokens).logits.float(), loaded.model(tokens).logits.float()
    assert 2.0**-8 < float((found - expected).norm() / expected.norm()) < 0.2


def test_a_projection_that_rounds_by_another_scale_is_a_product_of_its_own(
    artifact: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.self_attn.k_proj.input_scale"] *= 2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = {
        key.rpartition(".")[2] for key in problems(open_checkpoint(folder)) if f"{LAYER}.self_attn" in key
    }
    assert found == {"q_proj+v_proj", "k_proj", "o_proj"}


def test_what_no_manifest_calls_a_release_is_a_source_of_16_bits(artifact: Path) -> None:
    released = stored_weights(open_checkpoint(artifact))[QUERY].read().dequantize()
    manifest = (artifact / MANIFEST_NAME).read_bytes()
    (artifact / MANIFEST_NAME).unlink()
    try:
        source = stored_weights(open_checkpoint(artifact))
        assert not any(weight.is_quantized or weight.read_input for weight in source.values())
        assert torch.equal(source[QUERY].read(), released)
    finally:
        (artifact / MANIFEST_NAME).write_bytes(manifest)


def test_modelopt_has_a_name_for_rows_too(example_checkpoint: Path, tmp_path: Path) -> None:
    for export in EXPORTS:
        quantize(example_checkpoint, "fp8", tmp_path / export, export=export, progress=False)
    section = section_of(tmp_path / "modelopt")
    assert section["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert section["config_groups"]["group_0"]["input_activations"]["dynamic"] is True
    checkpoint = open_checkpoint(tmp_path / "modelopt")
    scale = checkpoint.tensors[f"{QUERY}.weight_scale"]
    assert (
        scale.dtype == torch.float32 and tuple(scale.shape) == checkpoint.tensors[f"{QUERY}.weight"].shape[:1]
    )
    ours, theirs = (stored_weights(open_checkpoint(tmp_path / export)) for export in EXPORTS)
    for module, weight in ours.items():
        assert weight.spec == theirs[module].spec == FP8()
        assert torch.equal(weight.read().dequantize(), theirs[module].read().dequantize())
        assert weight.read_input() == theirs[module].read_input()


def test_what_cannot_be_written_or_rounded_is_refused(
    example_checkpoint: Path, heldout_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="`activations: static` needs `scale: tensor` or `scale: row`"):
        FP8(BLOCKS, STATIC)
    with pytest.raises(ValueError, match="`activations` is dynamic or static; not 'fixed'"):
        FP8(TENSOR, "fixed")
    with pytest.raises(UserError, match="ModelOpt has no form for FP8, blocks of 128x128"):
        quantize(example_checkpoint, "fp8-block", tmp_path / "out", export="modelopt", progress=False)
    mixed = Recipe("mixed", spec=SPEC, rules=(Rule("*.o_proj", FP8()),))
    with pytest.raises(UserError, match="this recipe needs FP8 and FP8_PER_CHANNEL_PER_TOKEN"):
        quantize(example_checkpoint, mixed, tmp_path / "o", export="modelopt", calibration=heldout_text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("artifact", ["compressed-tensors"], indirect=True)
def test_transformers_reads_it_and_rounds_inputs_as_we_do(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, strayed = read_by_both(artifact)
    # Float32 sums in another order may send an input to its other neighbour, a step of 2^-3 away.
    assert strayed == set() and error <= 2.0**-10
    monkeypatch.setattr(E4M3StaticInput, "round", lambda self, x: x)
    assert read_by_both(artifact)[0] > 2.0**-8, "nothing was rounded"
