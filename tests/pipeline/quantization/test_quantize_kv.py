"""Artifacts whose keys and values are quantized: what is written, in which convention, and read back."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.inspect import inspect
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import EXPORTS
from scalegate.pipeline.conventions.kv_cache import kv_cache_of
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.calibration import calibration_text
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.records.recipe_file import load_recipe
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.serving_check.checks.weights import check_weights

FP8_LARGEST = 448.0
KV_ONLY = Recipe(name="kv", spec=Unquantized(), kv_cache="fp8")


@pytest.fixture
def text(tmp_path: Path, heldout_text: Path) -> Path:
    """Some thousand tokens, which calibrate in a second."""
    path = tmp_path / "text.jsonl"
    path.write_text(heldout_text.read_text(encoding="utf-8").splitlines()[0])
    return path


def made(source: Path, out: Path, recipe: Recipe | str, **options) -> tuple[Path, Artifact]:
    return out, quantize(source, recipe, out, progress=False, **options)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_the_weights_stay_and_the_scales_are_the_largest_keys_and_values(
    example_checkpoint: Path, text: Path, tmp_path: Path
):
    folder, artifact = made(example_checkpoint, tmp_path / "kv", "fp8-kv", calibration=text)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["config_groups"] == {}
    assert config["kv_cache_scheme"]["num_bits"] == 8 and artifact.kv_cache == "fp8"
    before, after = tensors(example_checkpoint), tensors(folder)
    scales = {name: tensor for name, tensor in after.items() if name not in before}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert sorted(scales)[:2] == ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"]
    assert len(scales) == 2 * 4

    checkpoint = open_checkpoint(folder)
    cache = kv_cache_of(checkpoint)
    assert cache.kv_format == "fp8" and sorted(cache.scales) == [0, 1, 2, 3]
    for layer, (key, value) in largest_in(example_checkpoint, text).items():
        assert float(cache.scales[layer].key) * FP8_LARGEST == pytest.approx(key, rel=0.02)
        assert float(cache.scales[layer].value) * FP8_LARGEST == pytest.approx(value, rel=0.02)
    assert load_model(folder, progress=False).layouts == {}
    baseline = open_checkpoint(example_checkpoint)
    compared = compare_weights(checkpoint, baseline, artifact, has_kv_format=True, progress=False)
    assert check_weights(compared.figures).status == "pass"
    assert check_weights(
        compare_weights(checkpoint, baseline, artifact, progress=False).figures
    ).status == "fail", "with keys and values unquantized nothing would be"  # fmt: skip


def largest_in(folder: Path, text: Path) -> dict[int, tuple[float, float]]:
    """By layer, the largest key and value in transformers' own cache after each 512 tokens."""
    loaded = load_model(folder, dtype=torch.float32, progress=False)
    ids = loaded.tokenizer(json.loads(text.read_text())["text"], add_special_tokens=False)["input_ids"]
    windows = torch.tensor(ids[: len(ids) // 512 * 512]).view(-1, 512)
    with torch.inference_mode():
        cache = loaded.model(windows, use_cache=True, logits_to_keep=1).past_key_values
    return {
        index: (float(layer.keys.abs().amax()), float(layer.values.abs().amax()))
        for index, layer in enumerate(cache.layers)
    }


def test_without_a_text_there_are_no_scales(example_checkpoint: Path, tmp_path: Path):
    folder, artifact = made(example_checkpoint, tmp_path / "kv", KV_ONLY)
    assert tensors(folder).keys() == tensors(example_checkpoint).keys()
    assert kv_cache_of(open_checkpoint(folder)).scales == {} and "vLLM" in artifact.kv_cache_engines
    assert artifact.kv_cache_engines["vLLM"] == "vllm serve FOLDER --kv-cache-dtype fp8"


@pytest.mark.parametrize("recipe", ["fp8-kv", "nvfp4-kv"])
def test_the_shipped_recipes_find_scales_on_what_the_model_writes(
    example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
):
    monkeypatch.setattr(calibration_text, "SEQUENCES", 2)
    monkeypatch.setattr(calibration_text, "SEQUENCE_TOKENS", 16)
    shown = said(example_checkpoint, tmp_path / "kv", recipe)
    assert f"keys and values: {load_recipe(recipe).kv_cache}, with scales found on what the model" in shown
    cache = kv_cache_of(open_checkpoint(tmp_path / "kv"))
    assert (
        sorted(cache.scales) == [0, 1, 2, 3] and min(float(scale.key) for scale in cache.scales.values()) > 0
    )
    assert Artifact.read(tmp_path / "kv").quantization["calibration"]["own"] == 2


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["made", "dry run"])
def test_the_kv_format_is_named_and_whether_it_is_scaled(
    example_checkpoint: Path, text: Path, tmp_path: Path, more: list[str]
):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("format: unquantized\nkv_cache: fp8\n")
    shown = said(example_checkpoint, tmp_path / "kv", recipe, *more)
    assert "keys and values: fp8, unscaled; give --calibration TEXT or self\n" in shown
    shown = said(example_checkpoint, tmp_path / "scaled", recipe, "--calibration", text, *more)
    assert "keys and values: fp8, with scales found on text.jsonl\n" in shown
    shown = said(example_checkpoint, tmp_path / "kvarn", "kvarn-k4v2", *more)
    assert "keys and values: kvarn_k4v2_g128\n" in shown
    assert "is not read" not in shown
    shown = said(example_checkpoint, tmp_path / "kvarn", "kvarn-k4v2", "--calibration", text, *more)
    assert f"--calibration {text} is not read: the recipe 'kvarn-k4v2' has nothing to calibrate\n" in shown


def said(source: Path, out: Path, recipe: Path | str, *words: Path | str) -> str:
    given = ["quantize", source, "--recipe", recipe, "--out", out, "--device", "cpu", *words]
    result = CliRunner().invoke(main, [str(word) for word in given])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_format_that_no_convention_declares_is_in_the_manifest(example_checkpoint: Path, tmp_path: Path):
    recipe = Recipe(name="kv", spec=Unquantized(), kv_cache="int8_per_token_head")
    folder, artifact = made(example_checkpoint, tmp_path / "kv", recipe)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert artifact.quantization["export"] == "plain"
    assert kv_cache_of(open_checkpoint(folder)).kv_format == "int8_per_token_head"
    assert kv_cache_of(open_checkpoint(folder), "unquantized").kv_format == "unquantized"
    (folder / "scalegate.json").unlink()
    assert kv_cache_of(open_checkpoint(folder)).kv_format == "unquantized"


@pytest.mark.parametrize(
    ("kv_cache", "export"),
    [
        # mxfp4 is for gpt-oss alone, and refused for that first.
        *(("kvarn_k4v2_g128", export) for export in EXPORTS if export not in ("plain", "mxfp4")),
        *(("nvfp4", export) for export in ("compressed-tensors", "torchao", "scalegate")),
        *(("fp8", export) for export in ("torchao", "scalegate")),
    ],
)
def test_an_export_that_would_declare_nothing_is_refused(
    example_checkpoint: Path, tmp_path: Path, kv_cache: str, export: str
):
    recipe = Recipe(name="kv", spec=Unquantized(), kv_cache=kv_cache)
    with pytest.raises(UserError, match=f"{export} has no place for {kv_cache} .*export plain, or leave"):
        made(example_checkpoint, tmp_path / "kv", recipe, export=export)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("kv_cache", "export"),
    [
        ("kvarn_k4v2_g128", "plain"),
        ("fp8", "plain"),
        ("fp8", "compressed-tensors"),
        ("fp8", "modelopt"),
        ("nvfp4", "modelopt"),
    ],
)
def test_what_is_written_in_other_exports_is_read_back(
    example_checkpoint: Path, tmp_path: Path, kv_cache: str, export: str
):
    recipe = Recipe(name="kv", spec=Unquantized(), kv_cache=kv_cache)
    folder, _ = made(example_checkpoint, tmp_path / "kv", recipe, export=export)
    assert inspect(folder).kv_cache == kv_cache


def test_quantized_weights_and_keys_are_in_one_declaration(
    example_checkpoint: Path, text: Path, tmp_path: Path
):
    recipe = Recipe(name="both", spec=NVFP4(), include=("*.0.mlp.down_proj",), kv_cache="fp8")
    options = {"calibration": text, "export": "modelopt"}
    folder, _ = made(example_checkpoint, tmp_path / "both", recipe, **options)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    sidecar = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    assert sidecar["kv_cache_quant_algo"] == "FP8" and sidecar["quant_algo"] == "W4A16_NVFP4"
    assert {"model.layers.3.self_attn.k_proj.k_scale", "model.layers.3.self_attn.v_proj.v_scale"} <= set(
        tensors(folder)
    )
    cache = kv_cache_of(open_checkpoint(folder))
    assert cache.kv_format == "fp8" and len(cache.scales) == 4


def test_a_manifest_that_contradicts_the_config_is_refused(example_checkpoint: Path, tmp_path: Path):
    folder, _ = made(example_checkpoint, tmp_path / "kv", KV_ONLY)
    manifest = json.loads((folder / "scalegate.json").read_text())
    (folder / "scalegate.json").write_text(json.dumps(manifest | {"kv_cache": "unquantized"}))
    with pytest.raises(
        UserError, match=r"declares the KV format fp8, but scalegate\.json declares unquantized"
    ):
        kv_cache_of(open_checkpoint(folder))


def test_a_recipe_without_anything_to_quantize_is_refused(example_checkpoint: Path, tmp_path: Path):
    with pytest.raises(UserError, match="leaves nothing to quantize"):
        made(example_checkpoint, tmp_path / "kv", Recipe(name="none", spec=Unquantized()))
