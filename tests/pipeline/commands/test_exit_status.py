"""Exit status 1 means that the gate failed, and nothing else does; the verdict survives what decorates it."""

import errno
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.pipeline.cli.main import COMMANDS, main
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.records.artifact import VERDICT_NAME, Artifact
from scalegate.pipeline.records.file_digests import sha256_of
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.tests.forked_command import running_pipeline
from scalegate.tests.verdict_files import read_verdict

from ...serving_check.gate_samples import sample_verdict

VALIDATE = importlib.import_module("scalegate.pipeline.commands.validate")
REPORT = importlib.import_module("scalegate.pipeline.report.write")
PIPELINE = [sys.executable, "-P", "-m", "scalegate.pipeline"]


def status_of(error: BaseException, monkeypatch, name: str = "doctor") -> tuple[int, str]:
    """Exit status and stderr of a command that ends in `error`."""

    @click.command(name)
    def command() -> None:
        raise error

    module = importlib.import_module(f"scalegate.pipeline.cli.{name}")
    monkeypatch.setattr(module, "command", command)
    result = CliRunner().invoke(main, [name])
    return result.exit_code, result.stderr


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (UserError("no such thing"), 2),
        (click.FileError("f"), 2),
        (RuntimeError("the unforeseen\nsecond line"), 70),
        (OSError(errno.ENOSPC, "No space left on device"), 70),
        (MemoryError(), 70),
        (click.exceptions.Exit(1), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_only_the_gates_own_fail_is_status_1(name, error, status, monkeypatch):
    assert status_of(error, monkeypatch, name)[0] == status


def test_an_unforeseen_error_is_one_line_that_says_where_its_traceback_is(monkeypatch):
    _, stderr = status_of(RuntimeError("the unforeseen\nsecond line"), monkeypatch)
    [line] = stderr.splitlines()
    assert line.startswith("Error: RuntimeError: the unforeseen; its traceback is in ")
    details = Path(line.rpartition(" ")[2])
    assert "second line" in details.read_text()
    details.unlink()


def test_where_no_file_can_be_written_the_traceback_is_on_stderr(monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    status, stderr = status_of(RuntimeError("the unforeseen"), monkeypatch)
    assert status == 70
    assert "Traceback" in stderr and stderr.splitlines()[-1].endswith("its traceback is above")


def test_output_that_nobody_reads_is_not_a_failed_gate():
    process = subprocess.Popen([*PIPELINE, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(60) == 141
    assert b"Error" not in process.stderr.read()


def test_ctrl_c_ends_a_running_command_with_130(two_layers, tmp_path):
    words = ["quantize", str(two_layers), "--recipe", "int4-hqq", "--out", str(tmp_path / "artifact")]
    with running_pipeline(words, tmp_path, dict(os.environ)) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "artifact").exists() and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
    assert process.exitcode == 130
    assert "Traceback" not in (tmp_path / "err").read_text()


@pytest.fixture(scope="module")
def made(two_layers, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exit") / "artifact"
    quantize(str(two_layers), "int4-hqq", out=folder, progress=False)
    return folder


@pytest.fixture
def measured(made, tmp_path, monkeypatch):
    """An artifact of its own, and what it is found to be without measuring."""
    folder = tmp_path / "artifact"
    shutil.copytree(made, folder)
    verdict = sample_verdict({1: 0.4})
    monkeypatch.setattr(VALIDATE, "measure_and_judge", lambda run: verdict)
    return folder, verdict


def full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_report_that_cannot_be_written_costs_neither_verdict_nor_status(measured, tmp_path):
    folder, verdict = measured
    (tmp_path / "file").touch()
    result = CliRunner().invoke(
        main, ["validate", str(folder), "--report", str(tmp_path / "file" / "report")]
    )
    assert result.exit_code == 1, result.output
    assert "FAIL" in result.stdout
    assert "Warning: the report's verdict could not be written" in result.stderr
    assert replace(read_verdict(folder / VERDICT_NAME), report={}) == verdict
    assert Artifact.read(folder).verdict_sha256 == sha256_of(folder / VERDICT_NAME)


def test_the_verdict_is_there_before_any_plot_is_drawn(measured, tmp_path, monkeypatch):
    folder, verdict = measured
    report = tmp_path / "report"
    monkeypatch.setattr(REPORT, "render_report", full_disk)
    result = CliRunner().invoke(main, ["validate", str(folder), "--report", str(report)])
    assert result.exit_code == 1
    assert read_verdict(report / VERDICT_NAME) == read_verdict(folder / VERDICT_NAME) == verdict
    assert result.stderr.count("No space left on device") == 1


def test_a_verdict_that_cannot_be_written_leaves_no_older_one(measured, monkeypatch):
    folder, verdict = measured
    replace(verdict, status="pass").write(folder / VERDICT_NAME)
    monkeypatch.setattr(Verdict, "write", full_disk)
    result = CliRunner().invoke(main, ["validate", str(folder)])
    assert result.exit_code == 1
    assert "Warning: the artifact's verdict could not be written" in result.stderr
    assert not (folder / VERDICT_NAME).exists()
