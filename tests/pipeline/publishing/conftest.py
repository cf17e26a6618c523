"""A fake Hub, a small artifact that has passed, and a way to run the real command against the two."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from scalegate.tests.pipeline.publishing.fake_hub import FakeHub
from scalegate.tests.pipeline.publishing.forked_pipeline import CommandResult, ForkedCommand
from scalegate.tests.pipeline.publishing.passed_artifact import make_artifact

HUB_VARIABLES = ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH")


@pytest.fixture
def hub():
    with FakeHub() as hub:
        yield hub


@pytest.fixture(scope="session")
def passed_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be copied: its verdict takes long to judge."""
    return make_artifact(tmp_path_factory.mktemp("passed") / "artifact")


@pytest.fixture
def artifact(passed_artifact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(passed_artifact, tmp_path / "artifact")


class Pipeline:
    """Runs `pipeline ...` in a process of its own: the Hub client reads its environment when imported."""

    def __init__(self, home: Path):
        self.home = home
        self.started: list[ForkedCommand] = []

    def start(self, *arguments: object, **environment: str) -> ForkedCommand:
        inherited = {name: value for name, value in os.environ.items() if name not in HUB_VARIABLES}
        inherited |= {"HF_HOME": str(self.home)} | environment
        output = self.home / f"command-{len(self.started)}"
        command = ForkedCommand([*map(str, arguments)], inherited, self.home, output)
        self.started.append(command)
        return command

    def __call__(self, *arguments: object, **environment: str) -> CommandResult:
        command = self.start(*arguments, **environment)
        stdout, stderr = command.communicate()
        return CommandResult(command.returncode, stdout, stderr)


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    home = tmp_path / "home"
    home.mkdir()
    pipeline = Pipeline(home)
    yield pipeline
    for process in pipeline.started:
        process.kill()
        process.wait()
