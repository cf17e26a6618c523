"""The calibration pass's results for one decoder layer, and the file that keeps them for a resumed job."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ....base.atomic_files import atomic_path
from ....base.errors import UserError
from ....layouts.formats.weight_format import spec_from_json, spec_to_json, weight_of
from ..quantizers.quantizer import QuantizedWeight
from ..solvers.equalization import EqualizedNorm
from ..solvers.second_order import Curvature

SQUARES, WEIGHT, NORM = "squares", "weight", "norm"


@dataclass(frozen=True)
class CalibratedWeight:
    """A weight that was rounded on a text.

    before: the squared error of the layer's output, relative to its square, if rounded without a text
    after:  the same with this weight
    """

    quantized: QuantizedWeight
    before: float
    after: float

    @classmethod
    def of(
        cls,
        original: Tensor,
        target: Tensor,
        candidates: Sequence[QuantizedWeight],
        curvature: Curvature,
        before: float | None = None,
    ) -> "CalibratedWeight":
        """Return the candidate whose outputs are nearest to the outputs of `target`, fp32 [N, K]; on the CPU.

        original: fp32 [N, K], from which the weight's own error is measured
        before:   the error without a text; None takes the first candidate's
        """
        values = [candidate.weight.dequantize(torch.float32) for candidate in candidates]
        losses = [output_error(dequantized, target, curvature) for dequantized in values]
        index = min(reversed(range(len(losses))), key=losses.__getitem__)
        weight = candidates[index].weight.to("cpu")
        error, norm = (
            float(numbers.square().sum(1).sum(dtype=torch.float64))
            for numbers in (values[index] - original, original)
        )
        quantized = QuantizedWeight(weight, error, norm)
        return cls(quantized, losses[0] if before is None else before, losses[index])


def output_error(values: Tensor, target: Tensor, curvature: Curvature) -> float:
    """Return the squared error of the outputs of `values` [N, K], as a share of the square of `target`'s."""
    whole = _energy(target, curvature)
    return _energy(values - target, curvature) / whole if whole else 0.0


def _energy(rows: Tensor, curvature: Curvature) -> float:
    """Return the sum over rows r [N, K] of r H rᵀ."""
    ordered = rows[:, curvature.order]
    return float(((ordered @ curvature.matrix) * ordered).sum(dtype=torch.float64))


@dataclass(frozen=True)
class CalibratedLayer:
    """The results for one layer, by module; `CalibrationResult` describes the fields."""

    largest: dict[str, float] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    solved: dict[str, CalibratedWeight] = field(default_factory=dict)
    scarce: list[str] = field(default_factory=list)
    equalized: dict[str, EqualizedNorm] = field(default_factory=dict)
    """The equalized norms, by the name of the norm's tensor."""
    learned: tuple[float, float] | None = None
    """The layer's error before and after its rounding was learned, as `LearnedLayer` has them."""

    @property
    def progress(self) -> str:
        """Return the layer's loss before and after, for a progress bar."""
        if self.learned is not None:
            return f"layer error {self.learned[0]:.2e} → {self.learned[1]:.2e}"
        if not self.solved:
            return ""
        before = sum(weight.before for weight in self.solved.values()) / len(self.solved)
        after = sum(weight.after for weight in self.solved.values()) / len(self.solved)
        return f"output error {before:.2e} → {after:.2e}"


def layer_path(folder: Path, index: int) -> Path:
    return folder / f"layer-{index:05d}.safetensors"


def write_layer(path: Path, layer: CalibratedLayer) -> None:
    """Write a layer's results atomically: the file is either complete or absent."""
    tensors = {f"{SQUARES}|{module}": values.clone() for module, values in layer.squares.items()}
    tensors |= {f"{NORM}|{name}": norm.weight.clone() for name, norm in layer.equalized.items()}
    equalized = {name: norm.modules for name, norm in layer.equalized.items()}
    solved = {}
    for module, weight in layer.solved.items():
        quantized = weight.quantized
        for name, tensor in quantized.weight.tensors().items():
            tensors[f"{WEIGHT}|{module}|{name}"] = tensor.clone(memory_format=torch.contiguous_format)
        solved[module] = {
            "spec": spec_to_json(quantized.weight.spec),
            "names": list(quantized.weight.tensors()),
            "error": quantized.squared_error,
            "norm": quantized.squared_norm,
            "before": weight.before,
            "after": weight.after,
        }
    facts = {
        "largest": layer.largest,
        "solved": solved,
        "scarce": layer.scarce,
        "equalized": equalized,
        "learned": layer.learned,
    }
    with atomic_path(path) as partial:
        save_file(tensors, partial, {"facts": json.dumps(facts)})


def read_layer(path: Path) -> CalibratedLayer:
    """Read what `write_layer` wrote. Raise UserError if the file is damaged."""
    with _opened(path) as (file, facts):
        squares = {
            key.removeprefix(f"{SQUARES}|"): file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118 - not a mapping
            if key.startswith(f"{SQUARES}|")
        }
        solved = {module: _weight(file, module, described) for module, described in facts["solved"].items()}
        equalized = {
            name: EqualizedNorm(file.get_tensor(f"{NORM}|{name}"), tuple(modules))
            for name, modules in facts["equalized"].items()
        }
        before_after = facts["learned"]
        learned = None if before_after is None else (float(before_after[0]), float(before_after[1]))
        return CalibratedLayer(facts["largest"], squares, solved, facts["scarce"], equalized, learned)


def read_calibrated_weight(path: Path, module: str) -> CalibratedWeight:
    """Return one weight from a file that `write_layer` wrote. Raise UserError if the file is damaged."""
    with _opened(path) as (file, facts):
        return _weight(file, module, facts["solved"][module])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Return the opened file, and the file's description of its tensors."""
    try:
        with safe_open(path, "pt") as file:
            yield file, json.loads(file.metadata()["facts"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run the same command again") from error


def _weight(file: Any, module: str, facts: Mapping[str, Any]) -> CalibratedWeight:
    tensors = {name: file.get_tensor(f"{WEIGHT}|{module}|{name}") for name in facts["names"]}
    weight = weight_of(spec_from_json(facts["spec"]), tensors)
    return CalibratedWeight(
        QuantizedWeight(weight, facts["error"], facts["norm"]), facts["before"], facts["after"]
    )
