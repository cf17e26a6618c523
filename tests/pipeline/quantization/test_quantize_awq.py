"""Recipes with `method: awq`: scales folded into norms, outputs nearer, and the gate that knows of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization import job_calibration
from scalegate.pipeline.quantization.calibration import calibration, calibration_text
from scalegate.pipeline.quantization.calibration.calibration_text import read_calibration_text
from scalegate.pipeline.quantization.solvers.equalization import column_scales, scaled_norm
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.records.recipe_fields import AWQ, AWQ_GPTQ
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.serving_check.checks.weights import check_weights
from scalegate.serving_check.evidence.verdict import CheckResult
from torch import nn

NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def text(heldout_text: Path) -> Path:
    return heldout_text


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, example_checkpoint: Path, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("awq") / "awq"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_text, "SEQUENCES", 24)
        patch.setattr(calibration_text, "SEQUENCE_TOKENS", 64)
        # The text alone, so that outputs on it are what the scales were chosen by.
        patch.setattr(job_calibration, "can_draw", lambda *_: False)
        recipe = Recipe("awq", spec=Int4(64), method=AWQ)
        quantize(example_checkpoint, recipe, folder, calibration=text, device="cpu", progress=False)
    return folder


def nearest(weight: torch.Tensor) -> torch.Tensor:
    """Seven levels to either side of zero, a scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    return (weight / scale).round() * scale


def judged(folder: Path, baseline: Path, manifest: Artifact) -> CheckResult:
    checkpoints = open_checkpoint(str(folder)), open_checkpoint(str(baseline))
    return check_weights(compare_weights(*checkpoints, manifest, progress=False).figures)


def test_columns_with_large_inputs_get_finer_weights():
    torch.manual_seed(0)
    weight, norm = torch.randn(64, 32), torch.ones(32, dtype=torch.bfloat16)
    x = torch.randn(500, 32)
    x[:, :3] *= 30
    divided = scaled_norm(norm, x.T @ x, [weight], [nearest])
    assert divided is not None
    columns = column_scales(norm, divided)
    assert columns[:3].min() > columns[3:].max()
    plain, scaled = nearest(weight), nearest(weight * columns) / columns
    assert ((scaled - weight) @ x.T).norm() < 0.6 * ((plain - weight) @ x.T).norm()


def test_inputs_that_are_alike_leave_the_norm_as_it_is():
    torch.manual_seed(0)
    weight, norm = torch.randn(64, 32), torch.ones(32, dtype=torch.bfloat16)
    assert scaled_norm(norm, torch.eye(32), [weight], [nearest]) is None


def test_outputs_suffer_less_and_the_manifest_names_the_norms(artifact: Path):
    modules = Artifact.read(artifact).quantization["modules"]
    scaled = {name: module for name, module in modules.items() if "scaled_by" in module}
    assert scaled and all("o_proj" not in name and "down_proj" not in name for name in scaled)
    errors = [scales["output_error"] for scales in scaled.values()]
    assert sum(error["calibrated"] for error in errors) < sum(error["data_free"] for error in errors)


def test_the_model_s_outputs_are_nearer_than_without_scales(
    artifact: Path, example_checkpoint: Path, text: Path, tmp_path: Path
):
    quantize(example_checkpoint, Recipe("plain", spec=Int4(64)), tmp_path, device="cpu", progress=False)
    tokens = read_calibration_text(open_checkpoint(str(example_checkpoint)), str(text)).sequences
    assert tokens is not None
    with torch.inference_mode():
        expected, plain, scaled = (
            load_model(folder, progress=False).model(tokens[-2:]).logits.float()
            for folder in (example_checkpoint, tmp_path, artifact)
        )
    assert (scaled - expected).norm() < (plain - expected).norm()


def test_the_gate_takes_the_norms_for_what_they_are(artifact: Path, example_checkpoint: Path):
    found = judged(artifact, example_checkpoint, Artifact.read(artifact))
    assert found.status == "pass", found.reason


@pytest.mark.parametrize("damage", ["norm", "another norm"])
def test_the_gate_finds_a_norm_that_was_changed(
    artifact: Path, example_checkpoint: Path, tmp_path: Path, damage: str
):
    for path in artifact.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    scaled = set(Artifact.read(artifact).scaled_modules().values())
    others = sorted(name for name in tensors if name.endswith("norm.weight") and name not in scaled)
    tensors[sorted(scaled)[0] if damage == "norm" else others[0]][:2] *= 1.5
    save_file(tensors, file, {"format": "pt"})
    assert judged(tmp_path, example_checkpoint, Artifact.read(artifact)).status == "fail"


def test_a_norm_that_is_none_keeps_its_weight(
    two_layers: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One whose output is not proportional to its weight: what the layer gives tells."""
    monkeypatch.setattr(calibration_text, "SEQUENCES", 8)
    monkeypatch.setattr(calibration_text, "SEQUENCE_TOKENS", 64)
    place = calibration.LayerStream.place

    def with_an_offset(stream: calibration.LayerStream, name: str) -> nn.Module:
        layer = place(stream, name)
        norm = layer.input_layernorm
        forward = type(norm).forward
        norm.forward = lambda x: forward(norm, x) + 20 * forward(norm, x) / norm.weight
        return layer

    monkeypatch.setattr(calibration.LayerStream, "place", with_an_offset)
    recipe = Recipe("awq", spec=Int4(64), method=AWQ, include=("model.layers.0.*",))
    made = quantize(two_layers, recipe, tmp_path / "out", calibration=text, device="cpu", progress=False)
    assert not [norm for norm in made.scaled_modules().values() if "input_layernorm" in norm]


def test_a_format_that_shares_tensors_is_refused(two_layers: Path, text: Path, tmp_path: Path):
    recipe = Recipe("no", spec=NVFP4(), method=AWQ_GPTQ)
    with pytest.raises(UserError, match="has no method 'awq-gptq'"):
        quantize(two_layers, recipe, tmp_path / "out", calibration=text, progress=False)
