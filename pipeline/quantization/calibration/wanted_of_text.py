"""What quantizers want of a text, by module, and what a pass over it has found."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from ..shards.tasks import WeightTask
from ..solvers.equalization import Equalized
from .calibrated_layer import CalibratedLayer, Solved, read_solved

ReadSolved = Callable[[], Solved]


@dataclass(frozen=True)
class Wanted:
    """What is looked for, by module."""

    largest: frozenset[str] = frozenset()
    """The largest magnitude among its inputs."""
    squares: frozenset[str] = frozenset()
    """The sum of squares of each of its inputs."""
    solved: Mapping[str, WeightTask] = field(default_factory=dict)
    """Its weight, rounded with the inputs in view."""
    corrects: bool = True
    """Whether what rounding a column leaves is taken over by others (`second_order.py`)."""
    equalizes: bool = False
    """Whether norms take over scales of the columns (`equalization.py`)."""
    learning_steps: int = 0
    """For how long each layer's rounding is learned after that (`learned_rounding.py`)."""

    def solves(self, modules: Iterable[str]) -> bool:
        return any(module in self.solved for module in modules)

    def __bool__(self) -> bool:
        return bool(self.largest or self.squares or self.solved)


@dataclass
class Found:
    """What a pass has found, by module.

    largest: of experts that no token reaches, the largest of their layer's
    squares: float64 [K]; an expert that no token reaches has none
    solved:  weights that were rounded, read one at a time: together they are as large as the artifact
    scarce:  experts with fewer tokens than they have inputs: solved with all of their layer's in view
    equalized: norms whose weights have taken over scales, by tensor
    learned:  by decoder layer, its error before and after its rounding was learned (`LearnedLayer`)
    """

    largest: dict[str, float] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    solved: dict[str, ReadSolved] = field(default_factory=dict)
    scarce: list[str] = field(default_factory=list)
    equalized: dict[str, Equalized] = field(default_factory=dict)
    learned: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, layer: CalibratedLayer, kept: Path | None) -> None:
        """kept: the file that the layer is in; left out, its weights stay in memory"""
        self.largest |= layer.largest
        self.squares |= layer.squares
        for module, one in layer.solved.items():
            self.solved[module] = (
                partial(_itself, one) if kept is None else partial(read_solved, kept, module)
            )
        self.scarce += layer.scarce
        self.equalized |= layer.equalized
        if layer.learned is not None:
            self.learned[name] = layer.learned


def _itself(solved: Solved) -> Solved:
    return solved
