"""The artifact read by transformers itself: the same predictions, others, or its own reason why not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.checkpoints.tokenizer import load_tokenizer
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.validation.also_load import TOKENS, read_by_transformers
from scalegate.serving_check.checks.other_readers import check_other_readers
from scalegate.serving_check.evidence.artifact_figures import ReaderFigures


@pytest.fixture(scope="module")
def ours(example_checkpoint: Path):
    return load_model(example_checkpoint, device="cpu", dtype=torch.bfloat16, progress=False).model


@pytest.fixture(scope="module")
def window(example_checkpoint: Path, heldout_text: Path) -> torch.Tensor:
    text = json.loads(heldout_text.read_text(encoding="utf-8").split("\n")[0])["text"]
    return torch.tensor(load_tokenizer(open_checkpoint(example_checkpoint)).encode(text))


def test_files_that_mean_the_same_pass(example_checkpoint: Path, ours, window):
    read = read_by_transformers(open_checkpoint(example_checkpoint), ours, window)
    assert read.refused is None and read.tokens == min(TOKENS, len(window))
    assert check_other_readers(ReaderFigures((), (read,))).status == "pass", read


def test_a_tensor_that_only_they_take_fails(example_checkpoint: Path, ours, window, tmp_path: Path):
    copy = shutil.copytree(example_checkpoint, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name] * 2}, copy / "model.safetensors", {"format": "pt"})
    read = read_by_transformers(open_checkpoint(copy), ours, window)
    result = check_other_readers(ReaderFigures((), (read,)))
    assert result.status == "fail" and "predicts otherwise" in result.reason


def test_what_they_cannot_load_is_told_and_not_known(example_checkpoint: Path, ours, window, tmp_path: Path):
    copy = shutil.copytree(example_checkpoint, tmp_path / "copy")
    checkpoint = open_checkpoint(copy)
    (copy / "model.safetensors").unlink()
    read = read_by_transformers(checkpoint, ours, window)
    result = check_other_readers(ReaderFigures((), (read,)))
    assert result.status == "pass" and read.refused is not None and read.refused in result.reason
    assert "did not load it" in result.measured
