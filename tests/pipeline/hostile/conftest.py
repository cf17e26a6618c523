"""A checkpoint, an artifact that has passed, and a file beside them that no test may change."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from scalegate.tests.pipeline.hostile.hostile_input import VICTIM
from scalegate.tests.pipeline.publishing.passed_artifact import make_artifact


@pytest.fixture
def checkpoint(example_checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(example_checkpoint, folder)
    return folder


@pytest.fixture(scope="session")
def passed_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be copied: its verdict takes long to judge."""
    return make_artifact(tmp_path_factory.mktemp("passed") / "artifact")


@pytest.fixture
def artifact(passed_artifact: Path, tmp_path: Path) -> Path:
    """A small artifact that has passed its gate."""
    return shutil.copytree(passed_artifact, tmp_path / "artifact")


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file beside every folder of a test, which no test may change."""
    path = tmp_path / "victim.txt"
    path.write_text(VICTIM)
    yield path
    assert path.read_text() == VICTIM
