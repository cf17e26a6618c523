"""Plugins are found by the first look-up in any registry, in every process, and one that fails is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REGISTERS = """
from scalegate.serving_check.profiles import PROFILES

assert "chat" in PROFILES, "a look-up while plugins are loaded finds what is there"
PROFILES.add({name!r}, PROFILES["chat"])
print("imported", {name!r})
"""
# A registry that needs no torch, which would take two seconds to import.
LISTS = "from scalegate.serving_check.profiles import PROFILES; print(*PROFILES); print(*PROFILES)"


def python(program: str, plugins: str = "", path: Path | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "SCALEGATE_PLUGINS": plugins}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def plugin(folder: Path, name: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(REGISTERS.format(name=name))
    return path


def test_modules_and_files_that_the_environment_names_are_imported_once(tmp_path: Path):
    file = plugin(tmp_path, "by_path")
    plugin(tmp_path, "by_name")
    lines = python(LISTS, f"{file}, by_name,{file}", tmp_path).stdout.splitlines()
    assert lines[:2] == ["imported by_path", "imported by_name"]
    assert lines[2] == lines[3] and lines[2].split()[-2:] == ["by_path", "by_name"]


def test_without_the_variable_nothing_is_imported(tmp_path: Path):
    plugin(tmp_path, "by_name")
    assert "by_name" not in python(LISTS, "", tmp_path).stdout


def test_an_installed_packages_entry_point_is_imported(tmp_path: Path):
    plugin(tmp_path, "installed_one")
    info = tmp_path / "installed_one-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-one\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[scalegate.plugins]\none = installed_one\n")
    assert python(LISTS, "", tmp_path).stdout.splitlines()[-1].endswith(" installed_one")


def test_adding_alone_imports_no_plugin(tmp_path: Path):
    program = "from scalegate.base.registry import Registry; Registry('thing').add('a', 1)"
    assert python(program, "no_such_module").returncode == 0
    looked_up = "from scalegate.base.registry import Registry; print('a' in Registry('thing'))"
    assert "no_such_module" in python(looked_up, "no_such_module").stderr


@pytest.mark.parametrize("content", ["1 / 0", "import nonsense_that_is_not_installed", "raise SystemError"])
def test_one_that_fails_is_named_on_the_command_line(tmp_path: Path, content: str):
    path = tmp_path / "broken.py"
    path.write_text(content)
    program = "from scalegate.pipeline.cli.main import main; main(['validate', '--help'])"
    result = python(program, str(path))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"Error: the plugin {path} (named in SCALEGATE_PLUGINS) cannot be imported" in result.stderr
