"""`pipeline compare`: several quantized checkpoints beside one baseline, as a table, JSON and on the card."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.compare import compare, distinct_names
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.records.artifact import MANIFEST_NAME, Artifact
from scalegate.pipeline.records.comparison import COMPARISON_NAME, read_comparison
from scalegate.pipeline.records.recipe import Recipe
from scalegate.tests.exhaustive import exhaustive_but
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture(scope="module")
def artifacts(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    recipes = (Recipe("g32", spec=Int4(32)), Recipe("g256", spec=Int4(256)), Recipe("nvfp4", spec=NVFP4()))
    for recipe in recipes:
        quantize(two_layers, recipe, folder / recipe.name, device="cpu", progress=False)
    return {recipe.name: folder / recipe.name for recipe in recipes}


def quantized_errors(folder: Path) -> dict[str, float]:
    return Artifact.read(folder).module_errors()


def test_all_are_held_against_one_baseline(artifacts: dict[str, Path], two_layers: Path) -> None:
    found = compare(list(artifacts.values()), two_layers, quality_tokens=800, dtype="float32", progress=False)
    g32, g256, nvfp4 = found.models
    assert g32.mean_kl < g256.mean_kl
    assert g32.p99_kl < g256.p99_kl
    assert g32.bits_per_weight == pytest.approx(4 + 20 / 32)
    assert nvfp4.bits_per_weight == pytest.approx(4.5, abs=0.01)
    assert g32.weight_bytes > g256.weight_bytes
    assert g32.extra_nats_per_token == pytest.approx(g32.nats_per_token - found.baseline_nats_per_token)
    kinds = set(g32.module_errors)
    assert any(kind.endswith("down_proj") for kind in kinds)
    errors = quantized_errors(artifacts["g32"])
    assert g32.weight_errors == pytest.approx(errors, rel=1e-3)
    assert len(errors) == 14
    assert all(model.unlike_baseline is None for model in found.models)
    assert found.warnings == []
    assert all(g32.module_errors[kind] < g256.module_errors[kind] for kind in kinds)
    assert len(found.table().splitlines()) == 4
    assert len(found.module_table().splitlines()) == 1 + len(kinds)


def test_the_baseline_beside_itself_differs_in_nothing(two_layers: Path) -> None:
    compared = compare([two_layers], two_layers, quality_tokens=300, progress=False).models[0]
    assert (compared.mean_kl, compared.extra_nats_per_token, compared.top1_agreement) == (0, 0, 1)


def test_folders_of_one_name_are_told_apart(artifacts: dict[str, Path], tmp_path: Path) -> None:
    for parent in ("a", "b"):
        shutil.copytree(artifacts["g32"], tmp_path / parent / "out")
    same = [open_checkpoint(tmp_path / parent / "out") for parent in ("a", "b")]
    assert distinct_names([*same, open_checkpoint(artifacts["g256"])]) == ["a/out", "b/out", "g256"]
    assert distinct_names([same[0], same[0]]) == ["out", "out"]


@pytest.mark.parametrize("is_ours", exhaustive_but([True, False], False))
def test_what_was_made_from_another_model_is_marked(
    artifacts: dict[str, Path], two_layers: Path, tmp_path: Path, is_ours: bool
) -> None:
    torch.manual_seed(0)
    other = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(two_layers), dtype=torch.bfloat16)
    other.save_pretrained(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(two_layers / name, tmp_path / "other")
    quantize(tmp_path / "other", Recipe("other"), tmp_path / "out", device="cpu", progress=False)
    foreign = tmp_path / "foreign"
    shutil.copytree(artifacts["g256"], foreign)
    (foreign / MANIFEST_NAME).unlink()
    if not is_ours:
        (tmp_path / "out" / MANIFEST_NAME).unlink()
    found = compare([foreign, tmp_path / "out"], two_layers, quality_tokens=300, progress=False)
    sound, strange = found.models
    assert sound.unlike_baseline is None
    assert ("was not made from the baseline" if is_ours else "made from another model") in str(
        strange.unlike_baseline
    )
    assert "out (!)" in found.table() and "foreign (!)" not in found.table()
    assert len(found.warnings) == 1


def test_the_command_keeps_it_for_the_card(artifacts: dict[str, Path]) -> None:
    folder = artifacts["g32"]
    arguments = ["compare", str(folder), "--quality-tokens", "300", "--card", "--json"]
    result = CliRunner().invoke(main, arguments, standalone_mode=False, catch_exceptions=False)
    said = json.loads(result.stdout[result.stdout.index("{") :])
    assert [model["name"] for model in said["models"]] == ["g32"]
    digest = Artifact.read(folder).bytes_digest()
    kept = read_comparison(folder, digest)
    assert kept is not None
    assert kept.models[0].mean_kl == said["models"][0]["mean_kl"]
    assert read_comparison(folder, "another digest") is None
    assert Artifact.read(folder).changed_files(folder) == []
    (folder / COMPARISON_NAME).write_text('{"tokens": 1}')
    with pytest.raises(UserError, match="not a comparison of Scalegate's"):
        read_comparison(folder, digest)
