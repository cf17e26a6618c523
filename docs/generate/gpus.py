"""Which layouts serve each weight format on each kind of GPU, as the layouts themselves answer.

No GPU is needed: layouts are asked with the compute capability that torch would report.
"""

import sys
from unittest.mock import patch

import torch
from scalegate.layouts.choosing.tried import MARKS, tried
from scalegate.layouts.formats.all_formats import WEIGHT_FORMATS
from scalegate.layouts.formats.input_format import dynamic_input
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import AnyLayout, Experts, ExpertsLayout, Problem

GPUS = {
    (7, 5): "T4 (7.5)",
    (8, 0): "A100 (8.0)",
    (8, 6): "A10 and RTX 30 (8.6)",
    (8, 9): "L4, L40S and RTX 40 (8.9)",
    (9, 0): "H100 and H200 (9.0)",
    (10, 0): "B200 (10.0)",
    (12, 0): "RTX 50 (12.0)",
}
SHAPE = (4096, 4096)
EXPERTS = Experts(128, 8)


def table() -> str:
    """A row for each weight format, dense and experts; a column for the GPUs with the same answers."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for capability, gpu in GPUS.items():
        cells = tuple(_cell(problem, capability) for _, problem in _rows())
        columns.setdefault(cells, []).append(gpu)
    lines = [f"| weights | {' | '.join(', '.join(gpus) for gpus in columns.values())} |"]
    lines.append(f"| --- |{' --- |' * len(columns)}")
    for row, (label, _) in enumerate(_rows()):
        lines.append(f"| {label} | {' | '.join(cells[row] for cells in columns)} |")
    return "\n".join(lines)


def _rows() -> list[tuple[str, Problem]]:
    rows = []
    for experts in (None, EXPERTS):
        # Registries are in the order of imports.
        for _, weight_format in sorted(WEIGHT_FORMATS.items()):
            first, *others = weight_format.variants()
            # Variants whose inputs are rounded otherwise have layouts of their own.
            others = [spec for spec in others if dynamic_input(spec) not in (None, dynamic_input(first))]
            for spec in [first, *others]:
                problem = Problem(spec, *SHAPE, torch.bfloat16, torch.device("cuda", 0), experts)
                rows.append((f"{spec.label}{', experts' * bool(experts)}", problem))
    return rows


def _cell(problem: Problem, capability: tuple[int, int]) -> str:
    return ", ".join(serving(problem, capability)) or "none"


def serving(problem: Problem, capability: tuple[int, int]) -> list[str]:
    """The layouts that serve it, in the order of preference, each with its marks.

    A star if a package must be installed; `MARKS` by how we tried a kernel of ours on such a GPU.
    """
    with (
        patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        patch.object(torch.cuda, "is_available", lambda: False),
    ):
        found = []
        for name, layout in LAYOUTS.items():
            if isinstance(layout, ExpertsLayout) != (problem.experts is not None):
                continue
            refusal = layout.refuses(problem)
            if refusal is None or refusal.startswith("package not installed"):
                mark = MARKS.get(tried(layout, capability), "")
                found.append(f"`{name}`{'*' * needs_package(layout)}{mark}")
        return found


def needs_package(layout: AnyLayout) -> bool:
    return hasattr(sys.modules[type(layout).__module__], "PACKAGE")
