"""The rooms stand in one order: pipeline over serving_check over layouts over kernels."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ["kernels", "layouts", "serving_check", "pipeline"]


def rooms_imported(source: str, package: tuple[str, ...]) -> set[str]:
    """The rooms that the import statements of `source`, a module of `package`, lead to."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["scalegate", *package][: len(package) + 2 - node.level] if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            targets = [[*module, alias.name] for alias in node.names]
        else:
            continue
        rooms |= {target[1] for target in targets if target[0] == "scalegate" and len(target) > 1}
    return rooms & set(FLOORS)


def upward_imports(source: str, package: tuple[str, ...]) -> list[str]:
    floor = FLOORS.index(package[0])
    return sorted(room for room in rooms_imported(source, package) if FLOORS.index(room) > floor)


def test_imports_go_only_downward():
    sources = [path for room in FLOORS for path in (ROOT / room).rglob("*.py")]
    assert len(sources) > 20
    found = {}
    for path in sources:
        package = path.relative_to(ROOT).parent.parts
        found[str(path.relative_to(ROOT))] = upward_imports(path.read_text(encoding="utf-8"), package)
    assert {path: rooms for path, rooms in found.items() if rooms} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from ..pipeline import push",
        "from ..pipeline.push import push",
        "from .. import pipeline",
        "import scalegate.pipeline.push",
        "from scalegate.pipeline import push",
        "def late():\n    from ..pipeline.push import push",
    ],
)
def test_an_upward_import_is_seen(line):
    assert upward_imports(line, ("layouts",)) == ["pipeline"]


def test_every_package_is_installed():
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for room in FLOORS:
        for init in (ROOT / room).rglob("__init__.py"):
            name = ".".join(("scalegate", *init.parent.relative_to(ROOT).parts))
            assert f'"{name}"' in declared, f"{name} is missing from pyproject.toml's packages"
