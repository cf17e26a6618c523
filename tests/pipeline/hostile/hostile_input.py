"""How the tests of hostile files run a command, and what they write."""

import json
from pathlib import Path

from click.testing import CliRunner
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.records.artifact import MANIFEST_NAME

SHA = "0" * 64
VICTIM = "years of work"
DEEP = '{"a":' * 5000 + "1" + "}" * 5000


def run(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """The one line of a command that must refuse; warnings of libraries are not counted."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("Error: ")]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.output
    return errors[0]


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes))


def add_file(artifact: Path, name: str) -> None:
    """Let the manifest claim one file more."""
    manifest = artifact / MANIFEST_NAME
    files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    edit(manifest, files=files | {name: {"size": len(VICTIM), "sha256": SHA}})
