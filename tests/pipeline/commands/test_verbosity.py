"""`-q` and `-v` on every command, before its name and after it: less on stderr, more, and the same result."""

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from scalegate.base.log import VARIABLE
from scalegate.pipeline.cli.main import COMMANDS, main


def quantized(out: Path, checkpoint: Path, before: list[str], after: list[str]) -> Result:
    words = ["quantize", str(checkpoint), "--recipe", "int4-hqq", "--out", str(out), "--json"]
    return CliRunner().invoke(main, [*before, *words, *after])


@pytest.fixture
def finished(two_layers: Path, tmp_path: Path) -> Path:
    """An artifact that is made again: that it is finished already is a notice."""
    assert quantized(tmp_path / "out", two_layers, [], []).exit_code == 0
    return tmp_path / "out"


@pytest.mark.parametrize("place", ["before", "after"])
def test_quiet_shows_no_notice_and_verbose_shows_more(finished, two_layers, place):
    def said(*words: str) -> str:
        placed = {"before": [], "after": [], place: list(words)}
        result = quantized(finished, two_layers, **placed)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["artifact"] == str(finished)
        return result.stderr

    usual, verbose = said(), said("-v")
    assert "is finished already" in usual
    assert said("-q") == said("--quiet") == ""
    assert set(verbose.splitlines()) > set(usual.splitlines()) and str(two_layers) in verbose
    assert said("-q", "-v") == verbose, "the last one counts"
    assert said() == usual, "they end with their command"


def test_a_failure_is_shown_by_a_quiet_command(tmp_path: Path):
    result = CliRunner().invoke(main, ["inspect", "-q", str(tmp_path / "nothing")])
    assert result.exit_code == 2 and result.stderr.startswith("Error: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_both_beside_its_own_options(name):
    command = main.get_command(click.Context(main), name)
    assert command is not None
    spelled = [word for option in command.params for word in option.opts if word.startswith("-")]
    assert len(spelled) == len(set(spelled))
    assert {"-v", "--verbose", "-q", "--quiet"} <= set(spelled)


def test_they_reach_the_processes_of_a_command(monkeypatch):
    seen = []

    @click.command("sign")
    def command() -> None:
        program = "from scalegate.base.log import least_level; print(least_level())"
        words = [sys.executable, "-P", "-c", program]
        seen.append(int(subprocess.run(words, capture_output=True, check=True).stdout))

    monkeypatch.setattr(importlib.import_module("scalegate.pipeline.cli.sign"), "command", command)
    for words in (["sign", "-q"], ["-v", "sign"], ["-v", "sign", "-q"], ["sign"]):
        assert CliRunner().invoke(main, words).exit_code == 0
    assert seen == [logging.WARNING, logging.DEBUG, logging.WARNING, logging.INFO]
    assert VARIABLE not in os.environ
