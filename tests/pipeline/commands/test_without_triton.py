"""Every command that needs no GPU works where triton and fcntl are not installed, as on macOS and Windows.

The hiding is `tests/without_triton`, which processes inherit; the whole suite can run under it too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from scalegate.serving_check.adapters import SubprocessEndpoint

HIDING = Path(__file__).parents[2] / "without_triton"
COMMAND = [sys.executable, "-P", "-m", "scalegate.pipeline"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = [str(HIDING), *filter(None, [os.environ.get("PYTHONPATH")])]
    cache = str(tmp_path_factory.mktemp("cache"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "SCALEGATE_CACHE": cache}


@pytest.fixture(scope="module")
def artifact(example_checkpoint: Path, environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "artifact"
    succeed(environment, "quantize", example_checkpoint, "--recipe", "int4-hqq", "--out", out)
    return out


def succeed(environment: dict[str, str], *words: object) -> str:
    done = subprocess.run([*COMMAND, *map(str, words)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_they_are_hidden(environment):
    for name in ("triton", "fcntl"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import {name}"], env=environment, capture_output=True
        )
        assert b"ModuleNotFoundError" in done.stderr


IMPORTS = """
import importlib, pkgutil, scalegate
for room in ("kernels", "layouts", "serving_check", "pipeline"):
    package = importlib.import_module(f"scalegate.{room}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            print(module.name)
"""


def test_every_module_can_be_imported(environment):
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 300


@pytest.mark.exhaustive
def test_doctor_says_what_is_missing(environment):
    layouts = json.loads(succeed(environment, "doctor", "--json"))["layouts"]
    assert any(layout["layout"] == "cpu_int4" and layout["refusal"] is None for layout in layouts)


@pytest.mark.exhaustive
def test_an_artifact_is_shown_and_laid_out(artifact: Path, environment):
    assert json.loads(succeed(environment, "inspect", artifact, "--json"))["formats"]
    plan = json.loads(succeed(environment, "layout", artifact, "--no-kv", "--m", "1,2", "--json"))
    of_a_cpu = {"cpu_int4", "cpu_int4_float32", "cpu_int4_tiles", "cpu_int4_amx", "dequantize"}
    assert {choice["layout"] for choice in plan["choices"]} <= of_a_cpu


@pytest.mark.exhaustive
def test_it_is_served(artifact: Path, environment, tmp_path: Path):
    serve = [*COMMAND, "serve", str(artifact), "--port", "0", "--max-num-seqs", "2", "--max-model-len", "64"]
    with SubprocessEndpoint(serve, "plain", log=tmp_path / "log", env=environment, progress=False) as plain:
        body = {"prompt": "def", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{plain.base_url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
