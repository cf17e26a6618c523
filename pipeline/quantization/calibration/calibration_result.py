"""The results of the pass over a calibration text, by module."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from ....layouts.formats.input_format import InputFormat
from ..shards.tasks import WeightTask
from ..solvers.equalization import EqualizedNorm
from .calibrated_layer import CalibratedLayer, CalibratedWeight, read_calibrated_weight
from .calibration_needs import calibrator

WeightReader = Callable[[], CalibratedWeight]


@dataclass
class CalibrationResult:
    """The fields are by module, unless they say otherwise.

    largest:   the inputs' largest magnitude; for an expert that no token reaches, the largest of its layer
    squares:   float64 [K], the sum of squares of each input; absent for an expert that no token reaches
    solved:    functions that read the weights rounded on the text, which together are as large as the
               artifact
    scarce:    experts with fewer tokens than inputs, rounded on the inputs of their whole layer
    equalized: norms that have absorbed scales, by the norm's tensor
    learned:   for each decoder layer, its error before and after its rounding was learned (`LearnedLayer`)
    """

    largest: dict[str, float] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    solved: dict[str, WeightReader] = field(default_factory=dict)
    scarce: list[str] = field(default_factory=list)
    equalized: dict[str, EqualizedNorm] = field(default_factory=dict)
    learned: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, layer: CalibratedLayer, file: Path | None) -> None:
        """file: the file with the layer's results; if None, its weights stay in memory"""
        self.largest |= layer.largest
        self.squares |= layer.squares
        for module, weight in layer.solved.items():
            self.solved[module] = (
                partial(_itself, weight) if file is None else partial(read_calibrated_weight, file, module)
            )
        self.scarce += layer.scarce
        self.equalized |= layer.equalized
        if layer.learned is not None:
            self.learned[name] = layer.learned


def _itself(weight: CalibratedWeight) -> CalibratedWeight:
    return weight


def input_formats(tasks: Sequence[WeightTask], result: CalibrationResult) -> dict[str, InputFormat]:
    """Return how each module's input is rounded; empty if no spec rounds inputs."""
    formats: dict[str, InputFormat] = {}
    for task in tasks:
        quantizer = calibrator(task.spec) if task.is_quantized else None
        if task.linear is not None and quantizer is not None:
            module = task.linear.module
            formats[module] = quantizer.input_format(task.spec, result.largest[module])
    return formats
