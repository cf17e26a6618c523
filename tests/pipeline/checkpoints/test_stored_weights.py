"""Stored weights against the source's: sound artifacts of every form are what their manifests say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.records.recipe_file import load_recipe
from scalegate.pipeline.validation.text_files import compare_text_files
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.serving_check.checks.weights import check_weights
from scalegate.serving_check.evidence.artifact_figures import WeightFigures
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

MIXED = """
format: int4
rules:
  - modules: '*.layers.2.*'
    ignore: true
  - modules: '*.down_proj'
    format: nvfp4
lm_head: quantize
embeddings: quantize
"""
FLOAT8 = torch.float8_e4m3fn


def figures_of(source: Path, folder: Path, **options) -> WeightFigures:
    quantize(source, out=folder, progress=False, **options)
    found = compare_weights(
        open_checkpoint(folder), open_checkpoint(source), Artifact.read(folder), progress=False
    )
    assert found is not None and found.figures.compared == found.figures.quantized > 0
    return found.figures


def require_exact(figures: WeightFigures, tolerance: float = 2e-5) -> None:
    result = check_weights(figures)
    assert result.status == "pass", result.reason
    errors = [error for kind in figures.kinds for error in kind.furthest]
    for error in errors:
        assert error.relative_error == pytest.approx(error.recorded, rel=tolerance), error


def test_mixed_formats_shards_and_an_untied_head_are_as_recorded(example_checkpoint: Path, tmp_path: Path):
    (tmp_path / "r.yaml").write_text(MIXED)
    recipe = load_recipe(tmp_path / "r.yaml")
    figures = figures_of(example_checkpoint, tmp_path / "out", recipe=recipe, max_shard_bytes=700_000)
    require_exact(figures)
    assert {kind.format.split()[0] for kind in figures.kinds} == {"INT4", "NVFP4"}
    assert figures.quantized == 21 + 2, "three layers of seven, head and embeddings"


def test_torchaos_zero_points_in_bf16_are_nearly_as_recorded(example_checkpoint: Path, tmp_path: Path):
    """They are rounded after the error was taken."""
    for zero in ("integer", "fractional"):
        recipe = Recipe("own", spec=Int4(64, zero_point=zero))
        figures = figures_of(example_checkpoint, tmp_path / zero, recipe=recipe, export="torchao")
        require_exact(figures, 2e-4)


def test_experts_cut_from_a_fused_tensor_are_as_recorded(tmp_path: Path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=64, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=1, intermediate_size=32, num_local_experts=4, layer_types=["full_attention"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(tmp_path / "source")
    figures = figures_of(tmp_path / "source", tmp_path / "out", recipe=Recipe("experts", spec=Int4(16)))
    require_exact(figures)
    assert figures.quantized >= 8 and not figures.missing and not figures.unknown


def test_a_source_in_fp8_is_compared_with_its_scales_multiplied_in(example_checkpoint: Path, tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    for path in example_checkpoint.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].float().abs().amax() / 448
        tensors[name] = (tensors[name].float() / scale).to(FLOAT8)
        blocks = [-(-length // 128) for length in tensors[name].shape]
        tensors[f"{name}_scale_inv"] = scale.expand(blocks).contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    keep = Recipe("keep", spec=Int4(128), ignore=("*.layers.0.mlp.*",))
    figures = figures_of(source, tmp_path / "out", recipe=keep)
    require_exact(figures)
    assert figures.kept > 18 and figures.changed_tensors == 0


def test_a_tokenizer_that_is_saved_again_is_the_same(example_checkpoint: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in example_checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(example_checkpoint)
    tokenizer("a text", truncation=True, max_length=2)
    tokenizer.save_pretrained(copy)
    assert (copy / "tokenizer.json").read_bytes() != (example_checkpoint / "tokenizer.json").read_bytes()
    assert compare_text_files(open_checkpoint(copy), open_checkpoint(example_checkpoint)) == ()
