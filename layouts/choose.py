"""Which layout serves a layer: by measurement where there is one, else by the order of preference."""

from .all_layouts import LAYOUTS
from .layout import Problem


def default_layout(problem: Problem) -> str:
    """The first layout, in the order of preference, that serves the problem; nothing is measured."""
    return next(name for name, layout in LAYOUTS.items() if layout.refuses(problem) is None)
