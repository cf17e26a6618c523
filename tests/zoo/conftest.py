"""The zoo's fixtures: the gate of `both_servers.py`, and another server of the baseline."""

from pathlib import Path

import pytest
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.validation.servers import server_of
from scalegate.serving_check.adapters.engine import ServerJob

from .both_servers import OPTIONS, zoo_of


@pytest.fixture(scope="session")
def artifact_folder(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo") / "artifact"
    quantize(str(example_checkpoint), "int4-hqq", out=folder, progress=False)
    # The default layout is slow with many rows on a CPU with AMX, which would be a fault of its own.
    layout(folder, progress=False)
    return folder


@pytest.fixture(scope="session")
def zoo(artifact_folder: Path, example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    with zoo_of(artifact_folder, example_checkpoint, tmp_path_factory.mktemp("servers")) as zoo:
        yield zoo


@pytest.fixture(scope="session")
def another_baseline(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    """A second server of the baseline, at a URL of its own."""
    logs = tmp_path_factory.mktemp("another")
    with server_of(
        ServerJob("embedded", "artifact", example_checkpoint, OPTIONS, logs / "artifact.log", progress=False)
    ) as endpoint:
        yield endpoint
