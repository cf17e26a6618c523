"""The artifact read by transformers itself, or by a server: the same predictions, others, or why not."""

import copy
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.checkpoints.tokenizer import load_tokenizer
from scalegate.pipeline.cli.validate import command
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.validation.also_load import DRAWN, TOKENS, read_by_server, read_by_transformers
from scalegate.pipeline.validation.options import ValidateOptions
from scalegate.pipeline.validation.servers import server_of
from scalegate.serving_check.adapters.engine import ServerJob
from scalegate.serving_check.adapters.placement import Placement
from scalegate.serving_check.checks.other_readers import check_other_readers
from scalegate.serving_check.engine.options import EngineOptions
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


STAND_IN = Path(__file__).with_name("vllm_stand_in.py")
OPTIONS = EngineOptions(device="cpu", dtype="bfloat16", max_num_seqs=1, max_model_len=TOKENS + DRAWN)


def run_with(reader: str, checkpoint: Path) -> SimpleNamespace:
    """The parts of a run that tell a reader what to load, and how."""
    return SimpleNamespace(
        asked=ValidateOptions(also_load=reader),
        artifact=open_checkpoint(checkpoint),
        options=OPTIONS,
        placement=Placement(startup_timeout=120),
        progress=False,
    )


@pytest.fixture(scope="module")
def a_server(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    logs = tmp_path_factory.mktemp("logs")
    with server_of(
        ServerJob("embedded", "artifact", example_checkpoint, OPTIONS, logs / "artifact.log", progress=False)
    ) as endpoint:
        yield endpoint.base_url


@pytest.mark.exhaustive
def test_a_server_that_predicts_the_same_passes(a_server: str, example_checkpoint: Path, ours, window):
    read = read_by_server(run_with(a_server, example_checkpoint), ours, window)
    assert read.refused is None and read.tokens == TOKENS
    result = check_other_readers(ReaderFigures((), (read,)))
    assert result.status == "pass" and f"{a_server} predicts the same" in result.reason


@pytest.mark.exhaustive
def test_a_server_that_takes_a_tensor_otherwise_fails(a_server: str, example_checkpoint: Path, ours, window):
    other = copy.deepcopy(ours)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(2)
    read = read_by_server(run_with(a_server, example_checkpoint), other, window)
    assert check_other_readers(ReaderFigures((), (read,))).status == "fail"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "told"), [("", "predicts the same"), ("memory", "Tried to allocate 2.00 GiB")]
)
def test_vllm_serves_the_artifact_and_tells_its_log_probabilities(
    example_checkpoint: Path, ours, window, tmp_path: Path, monkeypatch, fault: str, told: str
):
    stand_in = tmp_path / "vllm"
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{STAND_IN}" "$@"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("STAND_IN_WORDS", str(tmp_path / "words"))
    monkeypatch.setenv("STAND_IN", fault)
    read = read_by_server(run_with("vllm", example_checkpoint), ours, window)
    result = check_other_readers(ReaderFigures((), (read,)))
    assert result.status == "pass" and told in result.reason
    words = (tmp_path / "words").read_text()
    assert f"--max-model-len {TOKENS + DRAWN}" in words and "--dtype bfloat16" in words


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ("vllm", "no `vllm` command on PATH: pip install vllm in an environment of its own"),
        ("embedded", "unknown also_load 'embedded'; choose one of: transformers, none, vllm"),
        ("llama", "unknown also_load 'llama'"),
    ],
)
def test_a_reader_that_is_none_or_not_here_is_refused_at_once(
    example_checkpoint: Path, monkeypatch, reader: str, message: str
):
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(command, [str(example_checkpoint), "--also-load", reader])
    assert result.exit_code == 2 and message in result.output
