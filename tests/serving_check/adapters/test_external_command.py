"""Engines by other projects: which versions their own environment holds."""

import os
import sys
from pathlib import Path

import pytest
from scalegate.serving_check.adapters.vllm import VLLM

FORMS = {"short": "#!{}\n", "long": "#!/bin/sh\n'''exec' \"{}\" \"$0\" \"$@\"\n' '''\n"}
"""How pip begins a script; the second form is for paths that are too long for the first."""


def runnable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "bin"


@pytest.fixture
def python(tmp_path):
    """An interpreter whose environment has vLLM 0.26.0 and Triton 3.6.9, and nothing else."""
    site = tmp_path / "site"
    for name, version in (("vllm", "0.26.0"), ("triton", "3.6.9")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    script = f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n'
    return runnable(tmp_path / "own" / "python3.11", script)


@pytest.mark.parametrize("form", FORMS)
def test_versions_are_those_of_the_python_that_runs_the_command(on_path, python, form):
    command = runnable(on_path / "vllm", FORMS[form].format(python) + "import vllm\n")
    assert VLLM.versions() == {"vllm": "0.26.0", "triton": "3.6.9"}
    assert VLLM.availability().detail == f"{command}, 0.26.0"


@pytest.mark.parametrize("text", ["#!/bin/sh\nexec vllm\n", "#!/nowhere/python3\n", "\x7fELF"])
def test_a_command_that_does_not_say_which_python_runs_it_has_no_versions(on_path, text):
    command = runnable(on_path / "vllm", text)
    assert VLLM.versions() == {}
    assert VLLM.availability().detail == str(command)
