"""The one logger: whole lines on stderr, fewer or more as asked, in processes of a command as well."""

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scalegate.base.log import QUIET, VERBOSE, is_quiet, is_verbose, logger, verbosity
from scalegate.base.progress import progress_bar
from scalegate.base.stage_clock import StageClock

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("base", "kernels", "layouts", "serving_check", "pipeline")
COMMAND_LINE = "pipeline/cli"
"""The one folder that prints: a command's result."""


def say_everything() -> None:
    logger.debug("a detail")
    logger.info("a notice")
    logger.warning("take care")
    logger.error("it failed")


def lines_of(word: str | None, capsys) -> list[str]:
    if word is None:
        say_everything()
    else:
        with verbosity(word):
            say_everything()
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (QUIET, ["Warning: take care", "Error: it failed"]),
        (None, ["a notice", "Warning: take care", "Error: it failed"]),
        (VERBOSE, ["a detail", "a notice", "Warning: take care", "Error: it failed"]),
    ],
)
def test_each_verbosity_shows_its_levels(word, shown, capsys):
    assert lines_of(word, capsys) == shown


def test_verbosity_ends_with_its_block_and_nests(capsys):
    with verbosity(QUIET):
        with verbosity(VERBOSE):
            assert is_verbose() and not is_quiet()
        assert is_quiet()
    assert not is_quiet() and not is_verbose()
    assert len(lines_of(None, capsys)) == 3


def test_a_process_started_by_a_quiet_command_is_quiet():
    program = "from scalegate.base.log import logger; logger.info('a notice'); logger.warning('take care')"

    def started() -> str:
        words = [sys.executable, "-P", "-c", program]
        return subprocess.run(words, env=os.environ, capture_output=True, text=True, check=True).stderr

    with verbosity(QUIET):
        assert started() == "Warning: take care\n"
    assert started() == "a notice\nWarning: take care\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_and_stages_are_silent_in_a_quiet_command(monkeypatch):
    def written() -> str:
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        with StageClock().stage("quality"):
            for _ in progress_bar(range(2), shown=True):
                pass
        return terminal.getvalue()

    assert "2/2" in written() and "quality: " in written()
    with verbosity(QUIET):
        assert written() == ""


def test_a_line_on_a_terminal_does_not_run_into_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_bar(total=2, desc="loading", shown=True) as bar:
        bar.update()
        logger.info("a notice")
    assert "\ra notice\n" in terminal.getvalue()


def test_stderr_that_cannot_be_written_costs_no_result(monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    logger.warning("take care")


def printing(source: str, prints_results: bool) -> list[str]:
    """What `source` writes with past the logger, as `line: word`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id == "print":
            found.append(f"{node.lineno}: print")
        elif isinstance(node, ast.Attribute):
            word = ast.unparse(node)
            if word in ("warnings.warn", "sys.stderr.write") or (word == "click.echo" and not prints_results):
                found.append(f"{node.lineno}: {word}")
    return found


def test_no_shipped_module_prints_past_the_logger():
    paths = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 300
    found = {
        str(name): words
        for path in paths
        if (name := path.relative_to(ROOT)) != Path("base/log.py")
        and (words := printing(path.read_text(encoding="utf-8"), str(name).startswith(COMMAND_LINE)))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "print('a notice')",
        "def f(say=print): ...",
        "import sys; print('a notice', file=sys.stderr)",
        "import sys; sys.stderr.write('a notice')",
        "import warnings; warnings.warn('a notice', stacklevel=2)",
        "import click; click.echo('a notice', err=True)",
    ],
)
def test_a_module_that_prints_would_be_found(line):
    assert len(printing(line, prints_results=False)) == 1
    assert printing("import click; click.echo('a result')", prints_results=True) == []
