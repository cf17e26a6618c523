"""What a KV format costs in quality is measured over keys and values as serving stores them."""

from pathlib import Path

import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.validation.held_out import read_held_out
from scalegate.pipeline.validation.in_process import figures_of, load_models
from scalegate.pipeline.validation.run import LoadOptions
from scalegate.pipeline.validation.servers import refuse_unreached, server_of, sized_options
from scalegate.serving_check.adapters.engine import ServerJob
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.settings import WorkloadSettings


def figures(folder: Path, text: Path, kv_cache_dtype: str):
    checkpoint = open_checkpoint(folder)
    held_out = read_held_out(text, checkpoint, checkpoint, 512)
    engine = EngineOptions(device="cpu", dtype="float32", kv_cache_dtype=kv_cache_dtype)
    options = LoadOptions(engine, engine.dtype, progress=False)
    return figures_of(load_models(checkpoint, checkpoint, options), held_out, options).comparison


def test_eight_bits_cost_little_and_more_than_nothing(two_layers: Path, heldout_text: Path):
    divergences = {
        name: figures(two_layers, heldout_text, name).mean_kl
        for name in ("auto", "unquantized", "fp8", "int8_per_token_head")
    }
    assert divergences["auto"] == divergences["unquantized"] == 0.0
    assert 1e-6 < divergences["int8_per_token_head"] < divergences["fp8"] < 0.02


@pytest.fixture
def options() -> EngineOptions:
    return sized_options({"device": "cpu", "kv_cache_dtype": "fp8"}, WorkloadSettings())


def test_the_artifacts_server_is_started_with_the_format(
    options: EngineOptions, two_layers: Path, tmp_path: Path
):
    server = server_of(ServerJob("embedded", "artifact", two_layers, options, tmp_path / "artifact.log"))
    assert "--kv-cache-dtype fp8" in " ".join(server.command)


def test_a_running_server_cannot_be_given_a_format():
    with pytest.raises(UserError, match="--kv-cache-dtype applies only to a server that Scalegate starts"):
        refuse_unreached({"kv_cache_dtype": "fp8"}, "http://127.0.0.1:1", "embedded")
    refuse_unreached({"kv_cache_dtype": "auto"}, "http://127.0.0.1:1", "embedded")


def test_vllm_is_started_with_the_format(
    options: EngineOptions, two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "vllm").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    server = server_of(ServerJob("vllm", "artifact", two_layers, options, tmp_path / "artifact.log"))
    assert server.command[-2:] == ["--kv-cache-dtype", "fp8"]


def test_what_reaches_no_server_is_refused():
    with pytest.raises(UserError, match="--page-size does not apply to the engine 'vllm'"):
        refuse_unreached({"page_size": 16}, "vllm", "vllm")
    refuse_unreached({"page_size": 16, "layout": "dequantize"}, "vllm", "embedded")
    one_gpu = {"tensor_parallel_size": 1, "pipeline_parallel_size": None}
    refuse_unreached(one_gpu, "vllm", "embedded")
