"""The pass over a calibration text, one decoder layer at a time.

Each layer is read, its inputs are observed, and its weights are rounded if the recipe's method asks for it.
The layer then runs with the rounded weights, so that the next layer sees the inputs that it will get in
serving. While weights are rounded, the text also goes through the original layers: each weight aims half-way
at the original outputs on the original inputs (after GPTAQ: Li et al. 2025, arXiv 2504.02692; aiming all the
way overfits the text). The results of each layer are kept in a file in the work folder, so that an
interrupted job solves no layer twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....base.errors import UserError
from ....base.progress import progress_bar
from ...checkpoints.checkpoint import Checkpoint
from ...model_loader.hidden_states import HiddenStates
from ...model_loader.layer_stream import LayerStream
from ...model_loader.linear_weights import LM_HEAD, LinearWeight
from ...model_loader.weight_places import Places, kind_of, serve
from ..shards.shared_tensors import Shared
from ..shards.weight_tensors import WeightQuantizer
from ..solvers.equalization import EqualizedNorm
from ..solvers.learned_rounding import learn_rounding
from ..solvers.second_order import forget_recordings
from .calibrated_layer import CalibratedLayer, CalibratedWeight, layer_path, read_layer, write_layer
from .calibration_needs import CalibrationNeeds
from .calibration_result import CalibrationResult
from .layer_inputs import LAST, LayerInputs
from .layer_solver import LayerSolver, Problem


def calibrate(
    checkpoint: Checkpoint,
    linears: Sequence[LinearWeight],
    needs: CalibrationNeeds,
    sequences: Tensor,
    quantizer: WeightQuantizer,
    shared: Shared,
    folder: Path | None,
    progress: bool,
) -> CalibrationResult:
    """Return the statistics that `needs` asks for about `linears`, while the model reads `sequences` int64
    [S, T].

    folder: where finished layers are kept, and hidden states spilled; without one, nothing is kept
    Raises UserError if the model's layers cannot be run one by one.
    """
    result = CalibrationResult()
    if folder is not None:
        folder.mkdir(exist_ok=True)
    with torch.no_grad():
        stream = LayerStream(checkpoint, sequences, quantizer.device, folder)
        places = Places(stream.assignments, linears)
        names = [*stream.layers, *([LAST] if any(linear.role == LM_HEAD for linear in linears) else [])]
        done = [name for index, name in enumerate(names) if folder and layer_path(folder, index).is_file()]
        with progress_bar(total=len(names), desc="calibrating", unit=" layers", shown=progress) as bar:
            original = stream.states if needs.solved else None
            for index, name in enumerate(names):
                if folder is not None and name in done:
                    layer, original_after = read_layer(layer_path(folder, index)), None
                else:
                    visit = _Visit(stream, original, name, places, needs, quantizer, shared)
                    layer = visit.look()
                    original_after = visit.original_after
                    if folder is not None:
                        write_layer(layer_path(folder, index), layer)
                result.add(name, layer, None if folder is None else layer_path(folder, index))
                if name != LAST and len(done) < len(names):
                    if original is not None and original_after is None:
                        stream.place(name)
                        original_after = stream.after(name, original)
                    original = original_after
                    weights = {module: solved.quantized.weight for module, solved in layer.solved.items()}
                    with serve(stream, weights, places):
                        stream.place(name)
                        for tensor, norm in layer.equalized.items():
                            stream.put(tensor, norm.weight)
                        stream.advance(name)
                        stream.drop(name)
                bar.set_postfix_str(layer.progress, refresh=False)
                bar.update()
    forget_recordings()
    missing = [linear for linear in linears if linear.module in needs.largest - result.largest.keys()]
    result.largest |= _unreached(checkpoint, missing, result.largest)
    return result


@dataclass
class _Visit:
    """The visit to one layer: its inputs are observed and its weights rounded."""

    stream: LayerStream
    original: HiddenStates | None
    name: str
    places: Places
    needs: CalibrationNeeds
    quantizer: WeightQuantizer
    shared: Shared
    original_after: HiddenStates | None = None
    """The original model's hidden states after this layer, once `look` has returned."""

    def look(self) -> CalibratedLayer:
        inputs = LayerInputs(self.stream, self.original, self.name, self.places, self.needs)
        inputs.read()
        self.original_after = inputs.original_after
        solver = LayerSolver(self.stream, self.name, self.places, self.needs, self.quantizer, self.shared)
        equalized, scales = solver.equalize(inputs) if self.needs.equalizes else ({}, {})
        solved = solver.solve(inputs.by_module, inputs.solving, scales)
        learned = self._learn(solver, inputs, solved, equalized, scales)
        return CalibratedLayer(
            {
                module: sums.largest
                for module, sums in inputs.by_module.items()
                if module in self.needs.largest
            },
            {
                module: sums.squares.cpu()
                for module, sums in inputs.by_module.items()
                if module in self.needs.squares and sums.squares is not None
            },
            solved,
            inputs.scarce,
            equalized,
            learned,
        )

    def _learn(
        self,
        solver: LayerSolver,
        inputs: LayerInputs,
        solved: dict[str, CalibratedWeight],
        equalized: Mapping[str, EqualizedNorm],
        scales: Mapping[str, Tensor],
    ) -> tuple[float, float] | None:
        """Learn the rounding of the weights in `solved` in place; return the error before and after."""
        if not (self.needs.learning_steps and solved and self.original_after):
            return None

        if torch.cuda.is_available():
            # Otherwise the memory of solving stays reserved, in blocks that learning does not fit into.
            torch.cuda.empty_cache()

        def problem(module: str) -> Problem:
            return solver.problem(module, inputs.by_module[module], scales.get(module))

        learned = learn_rounding(
            self.stream,
            self.name,
            self.places,
            {module: weight.quantized.weight for module, weight in solved.items()},
            equalized,
            lambda module, weight: (solver.levels(module, weight), problem(module).target),
            self.original_after,
            self.needs.learning_steps,
        )
        if learned is None:
            return None
        for module, weight in learned.weights.items():
            solved[module] = problem(module).judged(weight, solved[module])
        return learned.before, learned.after


def _unreached(
    checkpoint: Checkpoint, missing: Sequence[LinearWeight], reached: Mapping[str, float]
) -> dict[str, float]:
    """For experts that no token reached, use the largest magnitude of their kind in the layer."""
    kinds: dict[str, float] = {}
    for module, largest in reached.items():
        kinds[kind_of(module)] = max(largest, kinds.get(kind_of(module), 0.0))
    for linear in missing:
        if kind_of(linear.module) not in kinds:
            raise UserError(
                f"{checkpoint.source}: the inputs of {linear.module} were not seen while the model ran; give "
                f"the recipe a rule `modules: '{linear.module}'` with `activations: false`"
            )
    return {linear.module: kinds[kind_of(linear.module)] for linear in missing}
