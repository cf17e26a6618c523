"""Imports lead one way: from floor to floor, from room to room within a floor, and nowhere in a circle.

Read from the source with `ast`, so imports inside functions and for type checkers count like all others.
"""

import ast
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "scalegate"
INIT = "__init__"
REST = "the rest"

FLOORS = ["base", "kernels", "layouts", "vllm_plugin", "serving_check", "pipeline"]
"""Lowest first: code imports from its own floor and from those before it."""

ROOMS = {
    "base": [INIT, "errors", REST, "plugins", "registry"],
    "kernels": [
        INIT, "device", "triton_versions", "triton_imports", "hadamard", "invariant_matmul", "cpu",
        "hopper", "sampling", "attention", "norms", "int4", "iq2_xxs", "nvfp4", "experts",
        "portable",
    ],
    "layouts": [INIT, "formats", "kv", "states", "packing", "modules", "choosing"],
    "vllm_plugin": [INIT, REST],
    "serving_check": [
        INIT, "profiles", "statistics", "settings", "engine", "adapters", "workload", "server",
        "evidence", "quality", "draws", "checks", "gate",
    ],
    "pipeline": [
        "machine", INIT, "report", "records", "checkpoints", "conventions", "gguf_file", "model_loader",
        "quantization", "validation", "publishing", "commands", "cli", "__main__",
    ],
}  # fmt: skip
"""A floor's sub-packages and files of its own, lowest first. A new one gets its place here.

A floor's `__init__` is run before all else in it, so it stands under what may not be imported there.
"""

Sources = Mapping[str, str]
"""Source by module name; a package's own is filed under `<package>.__init__`."""
Graph = Mapping[str, set[str]]
"""The modules that each module imports."""


@functools.cache
def project_sources() -> Sources:
    found = {f"{PROJECT}.{INIT}": (ROOT / f"{INIT}.py").read_text(encoding="utf-8")}
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            name = ".".join((PROJECT, *path.relative_to(ROOT).with_suffix("").parts))
            found[name] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def named_targets(module: str, source: str) -> list[list[str]]:
    """The dotted names, split, that the import statements of `module` spell out."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            found += [[*base, alias.name] for alias in node.names]
    return found


def import_graph(sources: Sources) -> Graph:
    """Who imports whom, counting what runs on the way: the `__init__` of each package entered anew."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        edges = graph[module] = set()
        for target in named_targets(module, source):
            names = [".".join(target[: depth + 1]) for depth in range(len(target))]
            packages = [name for name in names if f"{name}.{INIT}" in sources]
            outer = [name for name in packages if not module.startswith(f"{name}.")]
            # A last name that is no module is an object of the module, or else of the package, before it.
            reached = [name for name in names if name in sources] or packages[-1:]
            edges |= {f"{name}.{INIT}" if name in packages else name for name in (*outer, *reached)}
        edges.discard(module)
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """The sets of nodes that reach one another: the strongly connected components of more than one node."""
    reached = {node: reachable(graph, node) for node in graph}
    found = {tuple(sorted(other for other in reached[node] if node in reached[other])) for node in graph}
    return sorted(list(circle) for circle in found if circle)


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


def packages_of(graph: Graph) -> Iterable[str]:
    return [module.removesuffix(f".{INIT}") for module in graph if module.endswith(f".{INIT}")]


def within(graph: Graph, package: str) -> Graph:
    """The imports among the files and sub-packages of `package`, each sub-package taken as one."""

    def child(module: str) -> str | None:
        inside = module.startswith(f"{package}.")
        return module.removeprefix(f"{package}.").split(".")[0] if inside else None

    found: dict[str, set[str]] = {}
    for module, targets in graph.items():
        if (here := child(module)) is not None:
            others = {other for target in targets if (other := child(target)) is not None}
            found.setdefault(here, set()).update(others - {here})
    return found


def upward_imports(graph: Graph) -> list[str]:
    """Each import of a higher floor, or of a higher room of the same floor, as `module -> module`."""
    return sorted(
        f"{module} -> {target}"
        for module, targets in graph.items()
        for target in targets
        if height(target) > height(module)
    )


def height(module: str) -> tuple[int, int]:
    """Floor and room, as numbers that grow upward."""
    _, floor, *inside = module.split(".")
    if floor == INIT:
        return len(FLOORS), 0
    rooms = ROOMS.get(floor, [REST])
    return FLOORS.index(floor), rooms.index(inside[0] if inside[0] in rooms else REST)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(project_sources())


def planted(module: str, line: str) -> Graph:
    """The project's imports and those of `line`, written into `module`."""
    sources = dict(project_sources())
    sources[f"{PROJECT}.{module}"] += f"\n{line}\n"
    return import_graph(sources)


def test_every_room_has_its_place(graph):
    assert len(graph) > 200
    for floor, rooms in ROOMS.items():
        there = set(within(graph, f"{PROJECT}.{floor}"))
        assert set(rooms) - {REST} <= there, f"{floor} has no such room"
        assert REST in rooms or there <= set(rooms), f"give {there - set(rooms)} its place in ROOMS"


def test_imports_lead_down(graph):
    assert upward_imports(graph) == []


def test_no_module_imports_itself_by_way_of_others(graph):
    assert circles(graph) == []


def test_no_folder_has_files_or_packages_that_import_each_other(graph):
    found = {package: circles(within(graph, package)) for package in packages_of(graph)}
    assert len(found) > 20
    assert {package: circle for package, circle in found.items() if circle} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from ...pipeline.commands import push",
        "from ...pipeline.commands.push import push",
        "from ... import pipeline",
        "import scalegate.pipeline.commands.push",
        "from scalegate.pipeline.commands import push",
        "def late():\n    from ...pipeline.commands.push import push",
        "if TYPE_CHECKING:\n    from ...pipeline.commands.push import push",
    ],
)
def test_an_import_of_a_higher_floor_is_seen(line):
    found = upward_imports(planted("layouts.choosing.choose", line))
    assert found
    assert all(edge.startswith("scalegate.layouts.choosing.choose -> scalegate.pipeline.") for edge in found)


@pytest.mark.parametrize(
    ("module", "line", "target"),
    [
        ("layouts.formats.int4", "from ..packing.layout import Problem", "layouts.packing.layout"),
        ("base.registry", "from ..layouts.formats.int4 import Int4", "layouts.formats.int4"),
        ("serving_check.engine.engine", "from ..gate import gate", "serving_check.gate.gate"),
        ("serving_check.evidence.verdict", "from ..checks import loads", "serving_check.checks.loads"),
        ("pipeline.checkpoints.checkpoint", "from ..commands.push import push", "pipeline.commands.push"),
        ("pipeline.publishing.hub.publish", "from ...commands.release import x", "pipeline.commands.release"),
        (
            "pipeline.records.recipe",
            "def late():\n    from ..commands import validate",
            "pipeline.commands.validate",
        ),
    ],
)
def test_an_import_of_a_higher_room_is_seen(module, line, target):
    found = upward_imports(planted(module, line))
    assert f"{PROJECT}.{module} -> {PROJECT}.{target}" in found


@pytest.mark.parametrize(
    "line",
    [
        "from ..planted import x",
        "def late():\n    from .. import planted",
        "import scalegate.kernels.planted",
    ],
)
def test_a_circle_of_modules_is_seen(line):
    sources = {**project_sources(), "scalegate.kernels.planted": "from .sampling.top_k import y"}
    assert circles(import_graph(sources)) == []
    sources["scalegate.kernels.sampling.top_k"] += f"\n{line}\n"
    assert circles(import_graph(sources)) == [
        ["scalegate.kernels.planted", "scalegate.kernels.sampling.top_k"]
    ]


def test_a_circle_through_a_package_that_an_import_runs_is_seen():
    """`engine_work` imports no `endpoint`, but the package of a file that it does import, does."""
    (circle,) = circles(planted("serving_check.adapters.endpoint", "from ..workload import engine_work"))
    engines = f"{PROJECT}.serving_check.adapters"
    assert {f"{engines}.endpoint", f"{engines}.{INIT}"} < set(circle)


def test_two_packages_that_import_each_other_are_seen():
    """No module is in a circle, and yet neither package can be understood before the other."""
    graph = planted("pipeline.checkpoints.baseline", "from ..conventions.targets import listed")
    assert circles(graph) == []
    assert circles(within(graph, f"{PROJECT}.pipeline")) == [["checkpoints", "conventions"]]


def test_every_package_is_installed():
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for floor in FLOORS:
        for init in (ROOT / floor).rglob("__init__.py"):
            name = ".".join(("scalegate", *init.parent.relative_to(ROOT).parts))
            assert f'"{name}"' in declared, f"{name} is missing from pyproject.toml's packages"


def test_no_folder_has_more_files_than_one_looks_through():
    counts: dict[Path, int] = {}
    for folder in (*FLOORS, "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            counts[path.parent] = counts.get(path.parent, 0) + 1
    assert len(counts) > 60
    most = {folder: 30 if folder.is_relative_to(ROOT / "tests") else 25 for folder in counts}
    assert {folder: count for folder, count in counts.items() if count > most[folder]} == {}
