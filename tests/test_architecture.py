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

FLOORS = ["base", "kernels", "layouts", "vllm_plugin", "sglang_plugin", "serving_check", "pipeline"]
"""Lowest first: code imports from its own floor and from those before it."""

ROOMS = {
    "base": [INIT, "errors", REST, "plugins", "registry"],
    "kernels": [
        INIT, "inductor_pdl", "device", "triton_versions", "triton_imports", "e4m3", "hadamard",
        "invariant_matmul", "split_k", "cpu",
        "hopper", "sampling", "attention", "norms", "int4", "iq2_xxs", "nvfp4", "fp8",
        "experts", "portable", "states",
    ],
    "layouts": [INIT, "formats", "kv", "states", "packing", "modules", "choosing"],
    "vllm_plugin": [INIT, REST],
    "sglang_plugin": [INIT, REST],
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

LEVELS = {
    "kernels.attention": (15, 5, 23),
    "layouts": (6, 4, 7),
    "pipeline": (13, 11, 45),
    "pipeline.quantization": (10, 7, 23),
    "serving_check": (12, 6, 27),
    "serving_check.engine": (29, 8, 88),
}
"""Rooms, floors and arrows of a folder's own level, at most.

Whoever adds an arrow looks first for the room where the function belongs. For a new subject, raise the
numbers in its commit.
"""
MOST_LINES = 60
"""Of a function outside kernels."""
MOST_PARAMETERS = 8
MOST_OF_A_KERNEL = 20
BY_KEYWORD = {
    "base.option_fields.option": "all that a field of options may say",
    "layouts.modules.experts._": "torch reads the schema of an op from its parameters",
    "layouts.modules.experts._packed_experts_matmul": "the same",
    "layouts.modules.gated_experts._": "the same",
    "layouts.modules.gated_experts._gated_experts": "the same",
    "layouts.modules.rounded_inputs._": "the same",
    "layouts.modules.rounded_inputs._packed_matmul_rounded": "the same",
    "pipeline.cli.layout.command": "the options of a command",
    "pipeline.commands.layout.layout": "the same, of the Python API",
    "vllm_plugin.attention.__init__": "vLLM's own interface",
    "vllm_plugin.attention.forward": "the same",
}
"""Functions with more parameters, and why they have no type for them."""

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
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def named_targets(module: str, source: str) -> list[list[str]]:
    """The dotted names, split, that the import statements of `module` spell out."""
    found = []
    for node in ast.walk(parsed(source)):
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


def level(graph: Graph, package: str) -> tuple[int, int, int]:
    """How many rooms `package` has, how many stand on one another, and how many pairs import one another."""
    rooms = {room: targets - {INIT} for room, targets in within(graph, package).items() if room != INIT}

    @functools.cache
    def floors(room: str) -> int:
        return 1 + max(map(floors, rooms[room]), default=0)

    return len(rooms), max(map(floors, rooms)), sum(map(len, rooms.values()))


@functools.cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method of the project, with its module's name in front of its own."""
    return [
        (f"{module.removeprefix(f'{PROJECT}.')}.{node.name}", node)
        for module, source in project_sources().items()
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


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


@pytest.mark.parametrize("folder", LEVELS)
def test_a_folder_is_no_harder_to_find_one_s_way_in_than_it_was(graph, folder):
    now = level(graph, f"{PROJECT}.{folder}")
    assert all(count <= most for count, most in zip(now, LEVELS[folder], strict=True)), f"{now}: see LEVELS"


def test_one_more_arrow_of_a_folder_is_counted(graph):
    rooms, floors, arrows = level(graph, f"{PROJECT}.pipeline")
    more = planted("pipeline.conventions.plain", "from ..machine import cores")
    assert level(more, f"{PROJECT}.pipeline") == (rooms, floors, arrows + 1)


def test_functions_outside_kernels_fit_on_a_screen():
    lengths = {name: node.end_lineno - node.lineno + 1 for name, node in functions() if node.end_lineno}
    assert max(lengths.values()) > MOST_LINES, "some kernels are longer"
    long = {name: lines for name, lines in lengths.items() if lines > MOST_LINES}
    assert {name: lines for name, lines in long.items() if not name.startswith("kernels.")} == {}


def test_what_a_function_is_told_is_of_few_types():
    many = {}
    for name, node in functions():
        most = MOST_OF_A_KERNEL if name.startswith("kernels.") else MOST_PARAMETERS
        if (count := parameters(node)) > most:
            many[name] = count
    assert many.keys() == BY_KEYWORD.keys()


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
