"""A tree that is imported as `scalegate` without being installed works; its version is then not known."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest
from scalegate.base.installed import NOT_INSTALLED
from scalegate.serving_check.adapters import SubprocessEndpoint

ROOT = Path(__file__).resolve().parents[3]
# Without -S, Python itself adds the folder where Scalegate is installed.
COMMAND = [sys.executable, "-S", "-P", "-m", "scalegate.pipeline"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which there is all that is installed but Scalegate, and a link to the tree."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if "scalegate" not in each.name:
            (packages / each.name).symlink_to(each)
    (packages / "scalegate").symlink_to(ROOT)
    return os.environ | {"PYTHONPATH": str(packages)}


def test_its_version_is_not_known(environment):
    done = subprocess.run([*COMMAND, "--version"], env=environment, capture_output=True, text=True)
    assert done.stdout == f"pipeline, version {NOT_INSTALLED}\n"


@pytest.mark.exhaustive
def test_it_serves(environment, example_checkpoint: Path, tmp_path: Path):
    serve = [*COMMAND, "serve", str(example_checkpoint), "--port", "0", "--max-num-seqs", "2"]
    with SubprocessEndpoint(serve, "tree", log=tmp_path / "log", env=environment, progress=False) as tree:
        told = httpx.get(f"{tree.base_url}/version", timeout=60).json()
    assert told == {"version": NOT_INSTALLED}
