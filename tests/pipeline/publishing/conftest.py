"""A fake Hub, a small artifact that has passed, and a way to run the real command against the two."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_hub import FakeHub
from passed_artifact import make_artifact

COMMAND = [sys.executable, "-P", "-m", "scalegate.pipeline"]
HUB_VARIABLES = ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH")


@pytest.fixture
def hub():
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact")


class Pipeline:
    """Runs `pipeline ...` in a process of its own: the Hub client reads its environment when imported."""

    def __init__(self, home: Path):
        self.home = home
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in HUB_VARIABLES}
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            env=inherited | {"HF_HOME": str(self.home)} | environment,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    home = tmp_path / "home"
    home.mkdir()
    pipeline = Pipeline(home)
    yield pipeline
    for process in pipeline.started:
        process.kill()
        process.wait()
