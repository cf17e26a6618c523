"""What a KV format costs in quality is measured over keys and values as serving stores them."""

from pathlib import Path

import pytest
import torch
from scalegate.layouts.errors import UserError
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.validation.engines import EMBEDDED, VLLM, EngineOptions, endpoint_of
from scalegate.pipeline.validation.in_process import LoadOptions, read_held_out, take_figures
from scalegate.serving_check.settings import WorkloadSettings


def figures(folder: Path, text: Path, kv_cache_dtype: str, dtype: torch.dtype = torch.float32):
    checkpoint = open_checkpoint(folder)
    held_out = read_held_out(text, checkpoint, checkpoint, 1024)
    options = LoadOptions("cpu", dtype, None, kv_cache_dtype, progress=False)
    return take_figures(checkpoint, checkpoint, held_out, options).comparison


def test_eight_bits_cost_little_and_more_than_nothing(example_checkpoint: Path, heldout_text: Path):
    divergences = {
        name: figures(example_checkpoint, heldout_text, name).mean_kl
        for name in ("auto", "unquantized", "fp8", "int8_per_token_head")
    }
    assert divergences["auto"] == divergences["unquantized"] == 0.0
    assert 1e-6 < divergences["int8_per_token_head"] < divergences["fp8"] < 0.02


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return EngineOptions("cpu", "auto", WorkloadSettings(), tmp_path, progress=False)


def test_the_artifacts_server_is_started_with_the_format(options: EngineOptions, example_checkpoint: Path):
    endpoint = endpoint_of(EMBEDDED, "artifact", example_checkpoint, options, None, "fp8")
    assert "--kv-cache-dtype fp8" in " ".join(endpoint.command)


def test_a_running_server_cannot_be_given_a_format(options: EngineOptions, example_checkpoint: Path):
    with pytest.raises(UserError, match="is running already"):
        endpoint_of("http://127.0.0.1:1", "artifact", example_checkpoint, options, None, "fp8")


def test_vllm_is_started_with_the_format(
    options: EngineOptions, example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "vllm").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = endpoint_of(VLLM, "artifact", example_checkpoint, options, None, "fp8").command
    assert command[-2:] == ["--kv-cache-dtype", "fp8"]
