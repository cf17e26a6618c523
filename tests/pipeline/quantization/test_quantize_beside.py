"""Tensors beside the language model: prediction heads, files that no index names, what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.baseline import open_baseline
from scalegate.pipeline.checkpoints.checkpoint import INDEX_NAME, open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.modelopt import SIDECAR
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.validation.other_readers import misreadings
from scalegate.pipeline.validation.weights import compare_weights
from scalegate.tests.pipeline.quantization.tiny_families import make_text

RECIPE = Recipe("beside", spec=Int4(16))
HEADS = ("mtp.layers.0", "model.layers.2", "model.mtp.layers.0", "model.nextn_layers.0")
"""Where families keep a prediction head: beside the decoder, or as the layer after its last of two."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_text(tmp_path / "source", "llama")


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def head_of(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The last decoder layer once more, and the projection that a prediction head has."""
    layer = "model.layers.1."
    tensors = load_file(folder / "model.safetensors")
    head = {n.replace(layer, f"{prefix}."): t.clone() for n, t in tensors.items() if n.startswith(layer)}
    return head | {f"{prefix}.eh_proj.weight": torch.randn(64, 128, dtype=torch.bfloat16)}


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})


@pytest.mark.parametrize("prefix", HEADS)
@pytest.mark.parametrize("export", ["compressed-tensors", "modelopt"])
def test_a_prediction_head_stays_and_is_declared_unquantized(
    source: Path, tmp_path: Path, prefix: str, export: str
) -> None:
    change_config(source, num_nextn_predict_layers=1)
    head = head_of(source, prefix)
    add(source, head)
    recipe = RECIPE if export == "compressed-tensors" else "nvfp4"
    artifact = quantize(source, recipe, tmp_path / "out", export=export, progress=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in head.items())
    matrices = {name.removesuffix(".weight") for name, tensor in head.items() if tensor.dim() == 2}
    assert len(matrices) == 8 and matrices <= set(
        config_of(tmp_path / "out")["quantization_config"]["ignore"]
    )
    if export == "modelopt":
        sidecar = json.loads((tmp_path / "out" / SIDECAR).read_text())
        assert matrices <= set(sidecar["quantization"]["exclude_modules"])
    assert set(artifact.quantization["kept"]["multi-token prediction head"]) == set(head)
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1


def test_layers_beyond_the_config_s_are_no_head_where_it_counts_none(source: Path, tmp_path: Path) -> None:
    add(source, head_of(source, "model.layers.2"))
    with pytest.raises(UserError, match=r"has model.layers.2.* the config does not describe these files"):
        quantize(source, RECIPE, tmp_path / "out", progress=False)


def test_a_file_that_the_index_does_not_name_is_carried_and_indexed(source: Path, tmp_path: Path) -> None:
    head = head_of(source, "mtp.layers.0")
    save_file(head, source / "mtp.safetensors", {"format": "pt"})
    again = {f"other.{name}": tensor.clone() for name, tensor in head.items()}
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file(again, source / name, {"format": "pt"})
    copy = load_file(source / "model.safetensors")
    save_file(copy, source / "model.fp16.safetensors", {"format": "pt"})
    assert [path.name for path in open_checkpoint(source).unindexed] == ["mtp.safetensors"]
    quantize(source, RECIPE, tmp_path / "out", max_shard_bytes=100_000, progress=False)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())["weight_map"]
    assert head.keys() <= index.keys()
    assert not any(name.startswith("other.") for name in index)
    artifact = open_checkpoint(tmp_path / "out")
    assert artifact.unindexed == () and misreadings(artifact) == ()
    assert all(torch.equal(artifact.read(name), tensor) for name, tensor in head.items())


def test_buffers_that_old_versions_of_transformers_saved_are_no_weights(source: Path, tmp_path: Path) -> None:
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.embeddings.position_ids": torch.arange(64).unsqueeze(0),
        "model.layers.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(),
        "model.layers.0.attn.attention.masked_bias": torch.tensor(-1e4),
    }
    add(source, buffers)
    artifact = quantize(source, RECIPE, tmp_path / "out", progress=False)
    assert set(artifact.quantization["kept"]["not used by the model"]) == buffers.keys()
    assert load_model(tmp_path / "out", progress=False).model is not None


def test_what_a_recipe_leaves_out_is_named_and_not_missed(source: Path, tmp_path: Path) -> None:
    extra = {"v_head.summary.weight": torch.randn(1, 64), "v_head.summary.bias": torch.zeros(1)}
    add(source, extra)
    with pytest.raises(UserError, match=r"v_head.* `leave_out: \['v_head.\*'\]`"):
        quantize(source, RECIPE, tmp_path / "out", progress=False)
    recipe = Recipe("without", spec=Int4(16), leave_out=("v_head.*",))
    artifact = quantize(source, recipe, tmp_path / "out", progress=False)
    assert sorted(artifact.quantization["left_out"]) == sorted(extra)
    assert not extra.keys() & load_file(tmp_path / "out" / "model.safetensors").keys()
    opened = open_checkpoint(tmp_path / "out")
    found = compare_weights(opened, open_baseline(opened, None), opened.manifest, progress=False)
    assert found is not None and found.figures.missing == ()
    with pytest.raises(UserError, match="matches no tensor"):
        quantize(source, Recipe("none", leave_out=("w_head.*",)), tmp_path / "other", progress=False)


def test_a_checkpoint_with_another_program_s_tensors_is_served_without_them(source: Path) -> None:
    add(source, {"v_head.summary.weight": torch.randn(1, 64)})
    assert load_model(source, progress=False).model is not None
    add(source, {"model.layers.0.self_attn.z_proj.weight": torch.randn(64, 64)})
    with pytest.raises(UserError, match="has no such weight"):
        load_model(source, progress=False)


def test_a_config_counts_no_heads_where_they_are_left_out(source: Path, tmp_path: Path) -> None:
    change_config(source, num_nextn_predict_layers=1)
    add(source, head_of(source, "model.layers.2"))
    recipe = Recipe("without", spec=Int4(16), leave_out=("model.layers.2.*",))
    quantize(source, recipe, tmp_path / "out", progress=False)
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert not any(".2." in name for name in load_file(tmp_path / "out" / "model.safetensors"))
