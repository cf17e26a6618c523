"""What is installed outside the tested bounds is named once by a command and its processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from scalegate import LLM, UserError, layout, quantize, release, serve, validate
from scalegate.pipeline.cli.doctor import command as doctor
from scalegate.pipeline.commands.compare import compare
from scalegate.pipeline.machine.tested_stack import WARNED, as_sentence, untested_packages, warn_if_untested


@pytest.fixture
def stack(tmp_path: Path, monkeypatch):
    """Puts distributions of Scalegate and others in the place of those that are installed."""
    monkeypatch.setenv(WARNED, "undone at the end, whatever a test sets")
    monkeypatch.delenv(WARNED)
    folder = tmp_path / "stack"
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(folder)

    def install(name: str, version: str, *requires: str) -> None:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = [
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {requirement}" for requirement in requires),
        ]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))

    return install


@pytest.fixture
def untested(stack) -> None:
    stack("scalegate", "0.1.0", "torch<2.0,>=1.13")


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ("2.15.0", False),
        ("2.15.0+cpu", False),
        ("2.16.0", True),
        ("2.16.0+cpu", True),
        ("2.16.0.dev20261120", True),
        ("2.10.1", True),
        ("2.12.0a0+5228986c39", False),
    ],
)
def test_a_version_outside_its_bounds_is_named(stack, installed, named):
    stack("scalegate", "0.1.0", "torch<2.16,>=2.11")
    stack("torch", installed)
    said = [str(package) for package in untested_packages()]
    assert said == [f"torch {installed} (tested: >=2.11,<2.16)"] * named


def test_what_is_not_installed_or_not_for_this_machine_is_not_named(stack):
    extra, elsewhere = "pytest<1; extra == 'dev'", "numpy<1; platform_system == 'Plan 9'"
    stack("scalegate", "0.1.0", "no-such-package<1", extra, elsewhere)
    assert untested_packages() == []


def test_the_bounds_are_those_of_the_installed_distribution():
    """The suite's own environment is a tested one."""
    assert untested_packages() == []


def test_doctor_names_it(untested):
    text, told = (CliRunner().invoke(doctor, words).output for words in ([], ["--json"]))
    [package] = json.loads(told)["untested"]
    assert package["package"] == "torch" and package["tested"] == ">=1.13,<2.0"
    assert f"not tested with torch {package['installed']} (tested: >=1.13,<2.0)" in text


def test_it_is_said_once_by_a_process_and_those_that_it_starts(untested, capfd):
    warn_if_untested()
    warn_if_untested()
    child = "from scalegate.pipeline.machine.tested_stack import warn_if_untested as warn; warn()"
    subprocess.run([sys.executable, "-P", "-c", child], check=True)
    said = capfd.readouterr().err
    assert said.count("Warning: ") == 1 and as_sentence(untested_packages()) in said
    del os.environ[WARNED]
    subprocess.run([sys.executable, "-P", "-c", child], check=True)
    assert "Warning: " in capfd.readouterr().err, "a command of its own says it"


@pytest.mark.parametrize(
    "command",
    [
        lambda empty: compare([empty]),
        layout,
        LLM,
        quantize,
        lambda empty: release(empty, "int4-hqq", f"folder:{empty}", work=empty, m=[1, 2, 4, 8, 16, 32]),
        lambda empty: serve(empty, host="no address"),
        validate,
    ],
    ids=["compare", "layout", "LLM", "quantize", "release", "serve", "validate"],
)
def test_every_command_that_loads_a_model_says_it_first(untested, command, tmp_path: Path, capfd):
    with pytest.raises(UserError):
        command(tmp_path)
    assert capfd.readouterr().err.count("Scalegate was not tested with torch") == 1
