"""Progress of a long job: whole lines through a pipe, a redrawn bar on a terminal, nothing of quick ones."""

import io
import os
import sys
from types import SimpleNamespace
from typing import TextIO

import pytest
from click.testing import CliRunner
from scalegate.base import progress
from scalegate.base.progress import LINE_SECONDS, progress_bar
from scalegate.pipeline.cli.main import main


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """The bar's and tqdm's, so that a busy machine makes no job longer."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


def run_a_job(seconds: float, stderr: TextIO, clock: Clock, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with progress_bar(total=4, desc="loading", shown=True) as bar:
            for _ in range(4):
                clock.now += seconds / 4
                bar.set_postfix_str("4x4")
                bar.update()


def through_a_pipe(seconds: float, clock: Clock, monkeypatch) -> str:
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        run_a_job(seconds, pipe, clock, monkeypatch)
    # Kept as it came: a carriage return is what is looked for.
    with os.fdopen(read, newline="") as pipe:
        return pipe.read()


def test_a_pipe_gets_whole_lines_and_a_terminal_a_bar(clock, monkeypatch):
    lines = through_a_pipe(4 * LINE_SECONDS, clock, monkeypatch)
    assert "\r" not in lines and lines.endswith("\n")
    assert 4 <= len(lines.splitlines()) <= 5
    assert lines.splitlines()[-1].startswith("loading: 100%, 4/4, ")
    run_a_job(4 * LINE_SECONDS, terminal := Terminal(), clock, monkeypatch)
    assert "\r" in terminal.getvalue(), "what is looked for would be seen"


def test_what_is_quick_says_nothing_and_lines_keep_their_distance(clock, monkeypatch):
    assert through_a_pipe(0.9 * LINE_SECONDS, clock, monkeypatch) == ""
    assert len(through_a_pipe(1.4 * LINE_SECONDS, clock, monkeypatch).splitlines()) <= 2


def test_only_what_is_shown_is_written(clock, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    for shown in (False, None):
        for _ in progress_bar(range(3), shown=shown):
            clock.now += 2 * LINE_SECONDS
    assert stderr.getvalue() == "", "None is for terminals"


@pytest.mark.parametrize("kind", [progress.Bar, progress.ProgressLines])
def test_one_that_was_interrupted_while_it_was_made_can_be_closed(kind: type[progress.Bar]):
    kind.__new__(kind).close()


def test_quantize_writes_lines_through_a_pipe(monkeypatch, example_checkpoint, tmp_path):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    words = ["quantize", str(example_checkpoint), "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "\r" not in result.stderr
    said = [line for line in result.stderr.splitlines() if "%, " in line and " so far, " in line]
    assert len(said) >= 3 and ": 100%, " in said[-1]
