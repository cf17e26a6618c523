"""A toy KV format, registered by this file as a plugin: a choice on the command line, and served.

Eight bits whose range ends at 1.75, so that what it costs can be told from what the shipped formats cost. How
a format with arithmetic of its own is written is in `serving_check/test_engine_whole_page_format.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from scalegate import LLM, SamplingParams
from scalegate.layouts.kv.format import KV_FORMATS, TokenByToken
from scalegate.layouts.kv.layer import KVScales
from scalegate.serving_check.adapters import SubprocessEndpoint
from scalegate.tests.forked_command import run_pipeline

pytestmark = pytest.mark.long

NAME = "toy_clipped"
SCALE = torch.tensor([1 / 256])


class ClippedFormat(TokenByToken):
    """e4m3, which ends at 448, with one scale for all heads whatever the checkpoint says."""

    def allocate(self, shape, size, device, scales, workspaces):
        return super().allocate(shape, size, device, KVScales(SCALE, SCALE), workspaces)


if __name__ == "scalegate_plugin_test_toy_kv_format":
    KV_FORMATS.add(NAME, ClippedFormat(torch.float8_e4m3fn))

SERVE = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve"]
PROMPT = "import os\n\ndef read_lines(path):\n"
TOKENS = 24


def pipeline(*words: object, plugin: bool = True) -> subprocess.CompletedProcess:
    environment = {**os.environ, "SCALEGATE_PLUGINS": __file__ if plugin else ""}
    return run_pipeline(*words, environment=environment)


@pytest.mark.exhaustive
def test_it_is_served_in_the_engines_process(example_checkpoint: Path, tmp_path: Path):
    command = [*SERVE, str(example_checkpoint), "--port", "0", "--device", "cpu", "--dtype", "float32"]
    command += ["--max-num-seqs", "1", "--max-model-len", "128", "--kv-cache-dtype", NAME]
    environment = {"SCALEGATE_PLUGINS": __file__}
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with SubprocessEndpoint(command, "toy", log=tmp_path / "log", env=environment, progress=False) as toy:
        answer = httpx.post(toy.base_url + "/v1/completions", json=body, timeout=60).json()
        assert f'cache_dtype="{NAME}"' in httpx.get(toy.base_url + "/metrics").text
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with LLM(example_checkpoint, device="cpu", dtype="float32", max_num_seqs=1, max_model_len=128) as llm:
        [unquantized] = llm.generate(PROMPT, greedy)
    assert answer["choices"][0]["text"] != unquantized.text, "it stores as much as unquantized"


@pytest.mark.parametrize("command", ["serve", "validate", "release"])
def test_it_is_a_choice_on_the_command_line(command: str):
    assert NAME in pipeline(command, "--help").stdout


@pytest.mark.parametrize("command", ["serve", "validate"])
def test_without_its_registration_it_is_refused_by_name(example_checkpoint: Path, command: str):
    result = pipeline(command, example_checkpoint, "--kv-cache-dtype", NAME, plugin=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"unknown kv_cache_dtype '{NAME}'; choose one of: auto, unquantized, fp8" in result.stderr
