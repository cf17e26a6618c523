"""Builds the wheel of the kernels from the repository's own files, under the import name `scalegate_kernels`.

It holds `vllm_plugin/`, `sglang_plugin/` and every module of the repository that these import, directly or by
way of others.
All imports inside the repository are relative, so the modules work under either name. Only a wheel can be
built: a source distribution would lack the files that lie outside of this folder.
"""

import ast
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "scalegate_kernels"
PLUGINS = ("vllm_plugin", "sglang_plugin")


def imported_by(module: Path) -> set[Path]:
    """The repository's files that a file's relative imports name, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = module.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            found |= {base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)}
    return {path for path in found if path.is_file()}


def modules() -> set[Path]:
    """Every file of the wheel: the plugins', what they import, and the `__init__.py` of each package."""
    found: set[Path] = set()
    ahead = {path for plugin in PLUGINS for path in (ROOT / plugin).glob("*.py")}
    while ahead:
        path = ahead.pop()
        found.add(path)
        inits = {folder / "__init__.py" for folder in path.parents if folder.is_relative_to(ROOT)}
        ahead |= (imported_by(path) | (inits - {ROOT / "__init__.py"})) - found
        ahead = {path for path in ahead if path.is_file()}
    return found


FILES = modules()
FOLDERS = sorted({path.parent for path in FILES})
MODULES = {HERE / "__init__.py", *FILES}


class BuildNamedModules(build_py):
    """Takes of each package only what the plugin needs."""

    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if Path(each[2]).resolve() in MODULES]


def package_of(folder: Path) -> str:
    return ".".join((NAME, *folder.relative_to(ROOT).parts))


def outward(folder: Path) -> str:
    """The way from this folder, which setuptools wants: it takes no absolute path."""
    return "/".join(("..", "..", *folder.relative_to(ROOT).parts))


# Built elsewhere: what an earlier build has left here would go into the wheel.
with TemporaryDirectory() as elsewhere:
    setup(
        version=tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
        packages=[NAME, *map(package_of, FOLDERS)],
        package_dir={NAME: ".", **{package_of(folder): outward(folder) for folder in FOLDERS}},
        package_data={f"{NAME}.{PLUGINS[0]}": ["*.json"]},
        include_package_data=False,
        cmdclass={"build_py": BuildNamedModules},
        options={"build": {"build_base": elsewhere}},
    )
