"""`pipeline adopt`: another tool's checkpoint gets a manifest, and is pushed and checked like ours."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.adopt import adopt
from scalegate.pipeline.commands.inspect import inspect
from scalegate.pipeline.commands.push import push
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.records.artifact import MANIFEST_NAME, SOURCE_NAME, Artifact
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.serving_check.checks.weights import check_weights
from scalegate.serving_check.gate.record import judged_again
from scalegate.tests.pipeline.publishing.passed_artifact import PLOTS, give_verdict, passing_verdict
from transformers import Qwen3Config, Qwen3ForCausalLM

MADE = {"compressed-tensors": "int4-hqq", "modelopt": "nvfp4"}


def plain_checkpoint(folder: Path, seed: int = 0, width: int = 128, layers: int = 1) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64, hidden_size=width, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, head_dim=64, dtype="bfloat16",
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_checkpoint(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(params=MADE)
def foreign(request, base: Path, tmp_path: Path) -> tuple[Path, Artifact]:
    """A checkpoint as another tool leaves it, in its convention, and what our quantizer knew of it."""
    folder = tmp_path / "foreign"
    known = quantize(base, MADE[request.param], folder, export=request.param, progress=False)
    for name in (MANIFEST_NAME, SOURCE_NAME):
        (folder / name).unlink()
    return folder, known


def test_what_is_recorded_is_measured(foreign, base: Path):
    folder, known = foreign
    weights = (folder / "model.safetensors").read_bytes()
    adopted = adopt(folder, base, progress=False)
    assert adopted == Artifact.read(folder)
    assert adopted.module_errors() == pytest.approx(known.module_errors(), rel=1e-3)
    for field in ("formats", "export"):
        assert adopted.quantization[field] == known.quantization[field]
    bits = known.quantization["bits_per_weight"]
    assert adopted.quantization["bits_per_weight"] == pytest.approx(bits, rel=0.01)
    assert (adopted.files, adopted.source_sha256) == (known.files, known.source_sha256)
    assert (folder / "model.safetensors").read_bytes() == weights, "nothing of it is changed"
    compared = compare_weights(open_checkpoint(folder), open_checkpoint(base), adopted, progress=False)
    figures = compared.figures
    assert figures.is_ours and figures.quantized == figures.recorded == figures.compared == 7
    assert not figures.not_recorded and not figures.changed


def test_it_is_shown_pushed_and_refused_like_ours(foreign, base: Path, tmp_path: Path):
    folder, _ = foreign
    with pytest.raises(UserError, match=MANIFEST_NAME):
        push(folder, f"folder:{tmp_path / 'release'}", progress=False)
    done = CliRunner().invoke(main, ["adopt", str(folder), "--baseline", str(base), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["quantized"] == 7
    assert inspect(folder).is_artifact and inspect(folder).changed_files == []
    (folder / "serving_check").mkdir()
    for name, content in PLOTS.items():
        (folder / "serving_check" / name).write_bytes(content)
    manifest = Artifact.read(folder)
    verdict = passing_verdict(manifest)
    baseline = replace(verdict.baseline, weights_sha256=manifest.source_sha256)
    give_verdict(folder, manifest, judged_again(replace(verdict, baseline=baseline)))
    push(folder, f"folder:{tmp_path / 'release'}", progress=False)
    card = (tmp_path / "release" / "README.md").read_text(encoding="utf-8")
    assert "Another tool quantized it" in card and "pipeline adopt release --baseline base" in card
    assert "adopted.yaml" not in card
    change_a_weight(folder)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        push(folder, f"folder:{tmp_path / 'other'}", progress=False)


def test_an_adopted_artifact_with_one_corrupted_layer_fails(tmp_path: Path):
    """Its manifest records the errors as they were found, which excuses none of them."""
    base = plain_checkpoint(tmp_path / "base", layers=4)
    results = {}
    for name in ("sound", "corrupted"):
        folder = tmp_path / name
        quantize(base, "int4-hqq", folder, progress=False)
        for own in (MANIFEST_NAME, SOURCE_NAME):
            (folder / own).unlink()
        if name == "corrupted":
            shift_zero_points(folder, "model.layers.2.")
        adopted = adopt(folder, base, progress=False)
        compared = compare_weights(open_checkpoint(folder), open_checkpoint(base), adopted, progress=False)
        results[name] = check_weights(compared.figures)
    assert results["sound"].status == "pass", results["sound"].reason
    assert results["corrupted"].status == "fail"
    assert "far from others of their kind: model.layers.2." in results["corrupted"].reason


def change_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shift_zero_points(folder: Path, of: str) -> None:
    """Every packed zero point off by one."""
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.startswith(of) and name.endswith("weight_zero_point")]
    assert names
    for name in names:
        tensors[name] ^= 0x11111111
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_another_models_baseline_and_a_second_time_are_refused(foreign, base: Path, tmp_path: Path):
    folder, _ = foreign
    with pytest.raises(UserError, match="give the checkpoint that it was quantized from with --baseline"):
        adopt(folder, plain_checkpoint(tmp_path / "wide", width=256), progress=False)
    assert not (folder / MANIFEST_NAME).exists()
    adopt(folder, base, progress=False)
    with pytest.raises(UserError, match="already"):
        adopt(folder, base, progress=False)


def test_what_is_not_quantized_is_nothing_to_adopt(base: Path, tmp_path: Path):
    copy = shutil.copytree(base, tmp_path / "copy")
    with pytest.raises(UserError, match="nothing to adopt"):
        adopt(copy, base, progress=False)
