"""Artifacts that serve well here and that others read otherwise: each is named by its file and field."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.conventions.compressed_tensors import strict_section
from scalegate.pipeline.validation.other_readers import misreadings
from scalegate.serving_check.checks.other_readers import MAX_MEAN_KL, check_other_readers
from scalegate.serving_check.evidence.artifact_figures import ReadElsewhere, ReaderFigures

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDERS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and "-" in path.name)
Edit = Callable[[dict[str, Any]], object]


def first_group(section: dict[str, Any]) -> dict[str, Any]:
    return section["config_groups"]["group_0"]


def weights(section: dict[str, Any]) -> dict[str, Any]:
    return first_group(section)["weights"]


NO_SUCH = "compressed-tensors has no such field"
SECTIONS: dict[str, tuple[Edit, str]] = {
    "status": (lambda it: it.update(quantization_status="frozen"), "quantization_status: 'frozen'"),
    "no status": (lambda it: it.pop("quantization_status"), "quantization_status: "),
    "reordered columns": (
        lambda it: weights(it).update(actorder="group"),
        "actorder: 'group', and no tensor",
    ),
    "class in ignore": (lambda it: it["ignore"].append("Linear"), "ignore: 'Linear' is a class"),
    "outputs": (lambda it: first_group(it).update(output_activations=weights(it)), "output_activations: "),
    "unknown field": (lambda it: weights(it).update(zero_points=True), f"weights.zero_points: {NO_SUCH}"),
    "unknown section": (lambda it: it.update(rotation={}), f"rotation: {NO_SUCH}"),
    "sizes": (lambda it: weights(it).update(strategy="channel"), "group_size is 128 and strategy 'channel'"),
    "two formats": (lambda it: it.update(format="int-quantized"), "format: 'int-quantized', and its"),
}


def copy_of(name: str, folder: Path) -> Path:
    return shutil.copytree(FIXTURES / name, folder / name)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_other_makers_wrote_is_read_alike(name: str):
    assert misreadings(open_checkpoint(FIXTURES / name)) == ()


@pytest.mark.parametrize("case", SECTIONS)
@pytest.mark.parametrize("installed", [True, False])
def test_a_section_that_is_refused_or_skipped_elsewhere_is_named(
    case: str, installed: bool, tmp_path: Path, monkeypatch
):
    if not installed:
        monkeypatch.setattr(strict_section, "LIBRARY", "no_such_library")
    copy = copy_of("llmcompressor-w4a16", tmp_path)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    edit, told = SECTIONS[case]
    edit(config["quantization_config"])
    path.write_text(json.dumps(config))
    found = misreadings(open_checkpoint(copy))
    assert found and all(text.startswith("config.json: quantization_config.") for text in found)
    assert any(told in text for text in found), found


def test_weights_that_no_index_names_are_named(tmp_path: Path):
    copy = copy_of("llmcompressor-w4a16", tmp_path)
    save_file({"model.norm.weight": torch.zeros(4)}, copy / "extra.safetensors")
    assert [text.split(":")[0] for text in misreadings(open_checkpoint(copy))] == ["extra.safetensors"]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("quant_algo", "FP8", "quant_algo is 'FP8', in config.json 'NVFP4'"),
        ("kv_cache_quant_algo", "FP8", "kv_cache_quant_algo is 'fp8', in config.json None"),
        ("exclude_modules", [], "exclude_modules is [], in config.json ['lm_head'"),
    ],
)
def test_modelopts_two_files_have_to_agree(field: str, value: object, told: str, tmp_path: Path):
    copy = copy_of("modelopt-nvfp4", tmp_path)
    path = copy / "hf_quant_config.json"
    sidecar = json.loads(path.read_text())
    sidecar["quantization"][field] = value
    path.write_text(json.dumps(sidecar))
    (found,) = misreadings(open_checkpoint(copy))
    assert found.startswith("hf_quant_config.json: ") and told in found


def test_the_old_name_of_a_section_is_named(example_checkpoint: Path, tmp_path: Path):
    copy = shutil.copytree(example_checkpoint, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"compression_config": {"format": "dense"}}))
    (found,) = misreadings(open_checkpoint(copy))
    assert "compression_config is skipped" in found


@pytest.mark.parametrize(
    ("figures", "status", "told"),
    [
        (ReaderFigures(), "pass", "nothing that other readers"),
        (ReaderFigures(("config.json: x",)), "fail", "config.json: x"),
        (ReaderFigures((), (ReadElsewhere("transformers 5", 256, 3.4, 0.1, None),)), "fail", "mean KL 3.4"),
        (ReaderFigures((), (ReadElsewhere("transformers 5", 256, None, 0.0, None),)), "fail", "no finite"),
        (
            ReaderFigures((), (ReadElsewhere("transformers 5", 256, MAX_MEAN_KL / 2, 1.0, None),)),
            "pass",
            "same",
        ),
        (
            ReaderFigures((), (ReadElsewhere("transformers 5", 0, None, None, "no GPU"),)),
            "pass",
            "not known: no GPU",
        ),
    ],
)
def test_the_check_says_what_and_where(figures: ReaderFigures, status: str, told: str):
    result = check_other_readers(figures)
    assert result.status == status and told in result.reason
