"""A command reads the manifest of an artifact once and carries it: what it decides is on one state of it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.inspect import inspect
from scalegate.pipeline.commands.push import push
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.verify import verify
from scalegate.pipeline.records.artifact import Artifact
from scalegate.tests.pipeline.publishing.passed_artifact import make_artifact


@pytest.fixture
def reads(monkeypatch) -> Counter[str]:
    """How often each folder's manifest was read, by the folder's name."""
    counted: Counter[str] = Counter()
    read = Artifact.read

    def counting(folder: Path) -> Artifact:
        counted[Path(folder).name] += 1
        return read(folder)

    monkeypatch.setattr(Artifact, "read", counting)
    return counted


@pytest.fixture(scope="module")
def quantized(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "artifact"
    quantize(two_layers, "int4-hqq", folder, device="cpu", progress=False)
    return folder


def test_what_quantize_returns_is_what_it_wrote(two_layers, tmp_path, reads):
    made = quantize(two_layers, "int4-hqq", tmp_path / "artifact", device="cpu", progress=False)
    assert not reads
    made.left_out = {}
    assert made == Artifact.read(tmp_path / "artifact")
    reads.clear()
    assert quantize(two_layers, "int4-hqq", tmp_path / "artifact", device="cpu", progress=False)
    assert reads == {"artifact": 1}


def test_inspecting_reads_it_once(quantized, reads):
    assert inspect(quantized).is_artifact
    assert reads == {"artifact": 1}


def test_comparing_for_the_card_reads_it_once(quantized, reads):
    words = ["compare", str(quantized), "--card", "--quality-tokens", "300"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert reads == {"artifact": 1}


@pytest.mark.parametrize("command", [push, verify])
def test_publishing_and_verifying_read_it_once(tmp_path, reads, command: Callable):
    artifact = make_artifact(tmp_path / "artifact")
    arguments = (artifact, f"folder:{tmp_path / 'release'}") if command is push else (artifact,)
    assert command(*arguments)
    assert reads == {"artifact": 1}


def test_a_comparison_is_saved_for_no_card_but_an_artifact_s(two_layers, reads):
    result = CliRunner().invoke(main, ["compare", str(two_layers), "--card"])
    assert result.exit_code == 2 and "leave --card out" in result.output
