"""The wheel `scalegate-kernels` holds the repository's own files, and needs numpy, torch and triton alone."""

import ast
import configparser
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from scalegate.tests.vllm_plugin.stand_in import IMPORTING_VLLM

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "scalegate_kernels"
IMPORTS_ALL = f"""
import sys
import torch

class Refusing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("{PACKAGE}", "numpy", "torch", "triton"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=top)

# What torch and triton import themselves is theirs to need.
try:
    import triton
    import triton.experimental.gluon.language.nvidia.hopper
except ModuleNotFoundError:
    pass
for name in list(sys.modules):
    if name.partition(".")[0] in ("click", "tqdm", "yaml", "transformers"):
        del sys.modules[name]
sys.meta_path.insert(0, Refusing())
for module in sys.argv[1:]:
    __import__(module)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built by the setuptools that is installed, with nothing from the index."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    command += [
        "--disable-pip-version-check",
        "--no-index",
        "-w",
        str(out),
        str(ROOT / "packaging" / "kernels"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    [path] = out.glob("scalegate_kernels-*-py3-none-any.whl")
    return zipfile.ZipFile(path)


def modules_in(wheel: zipfile.ZipFile) -> list[str]:
    return sorted(name for name in wheel.namelist() if name.endswith(".py"))


def test_every_module_is_the_repositorys_own(wheel):
    for name in modules_in(wheel):
        inside = name.removeprefix(f"{PACKAGE}/")
        source = ROOT / ("packaging/kernels" if inside == "__init__.py" else ".") / inside
        assert wheel.read(name) == source.read_bytes(), name
    assert f"{PACKAGE}/vllm_plugin/measured.json" in wheel.namelist()


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_each_server_finds_its_plugin(wheel, group):
    [points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    read = configparser.ConfigParser()
    read.read_string(wheel.read(points).decode())
    module, _, function = read[group]["scalegate"].partition(":")
    source = wheel.read(module.replace(".", "/") + ".py").decode()
    assert function in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def test_installing_it_changes_no_other_package(wheel):
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    needs = Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist")
    assert sorted(need.partition(";")[0].strip() for need in needs) == ["numpy", "torch", "triton"], (
        "and no bounds"
    )


def test_every_module_imports_beside_its_dependencies_alone(wheel, tmp_path):
    wheel.extractall(tmp_path)
    names = [name.removesuffix(".py").replace("/", ".") for name in modules_in(wheel)]
    # Those that import a server cannot be imported without it; all else that they import is among the rest.
    importing = {f"{PACKAGE}.vllm_plugin.{name}" for name in IMPORTING_VLLM}
    importing.add(f"{PACKAGE}.sglang_plugin.int_linear")
    assert importing < set(names)
    rest = [name.removesuffix(".__init__") for name in names if name not in importing]
    assert len(rest) > 40
    finished = run_all(tmp_path, rest)
    assert finished.returncode == 0, finished.stderr
    assert "click" in run_all(tmp_path, ["click"]).stderr, "a module that is not needed is refused"


def run_all(site: Path, names: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-c", IMPORTS_ALL, *names]
    return subprocess.run(command, cwd=site, env={"PYTHONPATH": str(site)}, capture_output=True, text=True)
