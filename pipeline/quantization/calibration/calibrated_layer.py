"""What the calibration pass found in one decoder layer, and the file that keeps it for a job that goes on."""

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
from ..quantizers.quantizer import Quantized
from ..solvers.equalization import Equalized
from ..solvers.second_order import Curvature

SQUARES, WEIGHT, NORM = "squares", "weight", "norm"


@dataclass(frozen=True)
class Solved:
    """A weight rounded with its inputs in view.

    before: the output's squared error with the weight rounded without a text, as a share of its square
    after:  the same with this weight
    """

    quantized: Quantized
    before: float
    after: float

    @classmethod
    def of(
        cls,
        original: Tensor,
        target: Tensor,
        candidates: Sequence[Quantized],
        curvature: Curvature,
        before: float | None = None,
    ) -> "Solved":
        """The best of `candidates` for outputs like those of `target`, fp32 [N, K]; on the CPU.

        original: fp32 [N, K], which the weight's own error is the distance from
        before:   left out, the first candidate's
        """
        values = [one.weight.dequantize(torch.float32) for one in candidates]
        losses = [output_error(one, target, curvature) for one in values]
        index = min(reversed(range(len(losses))), key=losses.__getitem__)
        weight = candidates[index].weight.to("cpu")
        error = float((values[index] - original).square().sum(1).sum(dtype=torch.float64))
        quantized = Quantized(weight, error, candidates[index].squared_norm)
        return cls(quantized, losses[0] if before is None else before, losses[index])


def output_error(values: Tensor, target: Tensor, curvature: Curvature) -> float:
    """The squared error of the outputs of `values` [N, K], as a share of the square of `target`'s."""
    whole = _energy(target, curvature)
    return _energy(values - target, curvature) / whole if whole else 0.0


def _energy(rows: Tensor, curvature: Curvature) -> float:
    """The sum over rows r [N, K] of r H rᵀ."""
    ordered = rows[:, curvature.order]
    return float(((ordered @ curvature.matrix) * ordered).sum(dtype=torch.float64))


@dataclass(frozen=True)
class CalibratedLayer:
    """By module: see `calibration.Found`."""

    largest: dict[str, float] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    solved: dict[str, Solved] = field(default_factory=dict)
    scarce: list[str] = field(default_factory=list)
    equalized: dict[str, Equalized] = field(default_factory=dict)
    """By the norm's tensor."""
    learned: tuple[float, float] | None = None
    """The layer's error before and after its rounding was learned, as `LearnedLayer` has them."""

    @property
    def progress(self) -> str:
        """The layer's loss before and after, for a progress bar."""
        if self.learned is not None:
            return f"layer error {self.learned[0]:.2e} → {self.learned[1]:.2e}"
        if not self.solved:
            return ""
        before = sum(one.before for one in self.solved.values()) / len(self.solved)
        after = sum(one.after for one in self.solved.values()) / len(self.solved)
        return f"output error {before:.2e} → {after:.2e}"


def layer_path(folder: Path, index: int) -> Path:
    return folder / f"layer-{index:05d}.safetensors"


def write_layer(path: Path, layer: CalibratedLayer) -> None:
    """Atomically: the file is whole or absent."""
    tensors = {f"{SQUARES}|{module}": values.clone() for module, values in layer.squares.items()}
    tensors |= {f"{NORM}|{name}": one.weight.clone() for name, one in layer.equalized.items()}
    equalized = {name: one.modules for name, one in layer.equalized.items()}
    solved = {}
    for module, one in layer.solved.items():
        for name, tensor in one.quantized.weight.tensors().items():
            tensors[f"{WEIGHT}|{module}|{name}"] = tensor.clone(memory_format=torch.contiguous_format)
        solved[module] = {
            "spec": spec_to_json(one.quantized.weight.spec),
            "names": list(one.quantized.weight.tensors()),
            "error": one.quantized.squared_error,
            "norm": one.quantized.squared_norm,
            "before": one.before,
            "after": one.after,
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
    """Undoes `write_layer`. UserError where the file is damaged."""
    with _opened(path) as (file, facts):
        squares = {
            key.removeprefix(f"{SQUARES}|"): file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118 - not a mapping
            if key.startswith(f"{SQUARES}|")
        }
        solved = {module: _solved(file, module, one) for module, one in facts["solved"].items()}
        equalized = {
            name: Equalized(file.get_tensor(f"{NORM}|{name}"), tuple(modules))
            for name, modules in facts["equalized"].items()
        }
        before_after = facts["learned"]
        learned = None if before_after is None else (float(before_after[0]), float(before_after[1]))
        return CalibratedLayer(facts["largest"], squares, solved, facts["scarce"], equalized, learned)


def read_solved(path: Path, module: str) -> Solved:
    """One weight of what `write_layer` wrote. UserError where the file is damaged."""
    with _opened(path) as (file, facts):
        return _solved(file, module, facts["solved"][module])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The file, and what it says of its tensors."""
    try:
        with safe_open(path, "pt") as file:
            yield file, json.loads(file.metadata()["facts"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run the same command again") from error


def _solved(file: Any, module: str, facts: Mapping[str, Any]) -> Solved:
    tensors = {name: file.get_tensor(f"{WEIGHT}|{module}|{name}") for name in facts["names"]}
    weight = weight_of(spec_from_json(facts["spec"]), tensors)
    return Solved(Quantized(weight, facts["error"], facts["norm"]), facts["before"], facts["after"])
