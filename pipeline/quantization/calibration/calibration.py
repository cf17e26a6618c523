"""The pass over a text in which calibrated quantizers learn what they need, one decoder layer at a time.

Each layer is read, looked into, solved where its quantizer asks for that, and left with the weights that
will be served, so that the next layer's inputs are those it will get. Where weights are solved, the text
goes through the original layers beside that, and each weight is asked for what the original makes of its
own inputs, half of the way (after GPTAQ: Li et al. 2025, arXiv 2504.02692; all of the way fits the text
more than the model). What was found of a layer is a file in the work folder: an interrupted job solves
no layer again.
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
from ..solvers.equalization import Equalized
from ..solvers.learned_rounding import learn_rounding
from ..solvers.second_order import forget_recordings
from .calibrated_layer import CalibratedLayer, Solved, layer_path, read_layer, write_layer
from .layer_inputs import LAST, LayerInputs
from .layer_solver import LayerSolver, Problem
from .wanted_of_text import Found, Wanted


def calibrate(
    checkpoint: Checkpoint,
    linears: Sequence[LinearWeight],
    wanted: Wanted,
    sequences: Tensor,
    quantizer: WeightQuantizer,
    shared: Shared,
    folder: Path | None,
    progress: bool,
) -> Found:
    """Everything `wanted` of `linears` while the model reads `sequences` int64 [S, T].

    folder: where finished layers are kept, and hidden states spilled; left out, nothing is kept
    Raises UserError where the model's layers cannot be run one by one.
    """
    found = Found()
    if folder is not None:
        folder.mkdir(exist_ok=True)
    with torch.no_grad():
        stream = LayerStream(checkpoint, sequences, quantizer.device, folder)
        places = Places(stream.assignments, linears)
        names = [*stream.layers, *([LAST] if any(one.role == LM_HEAD for one in linears) else [])]
        done = [name for index, name in enumerate(names) if folder and layer_path(folder, index).is_file()]
        with progress_bar(total=len(names), desc="calibrating", unit=" layers", shown=progress) as bar:
            original = stream.states if wanted.solved else None
            for index, name in enumerate(names):
                if folder is not None and name in done:
                    layer, original_after = read_layer(layer_path(folder, index)), None
                else:
                    visit = _Visit(stream, original, name, places, wanted, quantizer, shared)
                    layer = visit.look()
                    original_after = visit.original_after
                    if folder is not None:
                        write_layer(layer_path(folder, index), layer)
                found.add(name, layer, None if folder is None else layer_path(folder, index))
                if name != LAST and len(done) < len(names):
                    if original is not None and original_after is None:
                        stream.place(name)
                        original_after = stream.after(name, original)
                    original = original_after
                    weights = {module: one.quantized.weight for module, one in layer.solved.items()}
                    with serve(stream, weights, places):
                        stream.place(name)
                        for tensor, norm in layer.equalized.items():
                            stream.put(tensor, norm.weight)
                        stream.advance(name)
                        stream.drop(name)
                bar.set_postfix_str(layer.progress, refresh=False)
                bar.update()
    forget_recordings()
    missing = [one for one in linears if one.module in wanted.largest and one.module not in found.largest]
    found.largest |= _unreached(checkpoint, missing, found.largest)
    return found


@dataclass
class _Visit:
    """One layer, while it is looked into."""

    stream: LayerStream
    original: HiddenStates | None
    name: str
    places: Places
    wanted: Wanted
    quantizer: WeightQuantizer
    shared: Shared
    original_after: HiddenStates | None = None
    """The original's states after this layer, once it has been looked into."""

    def look(self) -> CalibratedLayer:
        inputs = LayerInputs(self.stream, self.original, self.name, self.places, self.wanted)
        inputs.read()
        self.original_after = inputs.original_after
        solver = LayerSolver(self.stream, self.name, self.places, self.wanted, self.quantizer, self.shared)
        equalized, scales = solver.equalize(inputs) if self.wanted.equalizes else ({}, {})
        solved = solver.solve(inputs.by_module, inputs.solving, scales)
        learned = self._learn(solver, inputs, solved, equalized, scales)
        return CalibratedLayer(
            {m: one.largest for m, one in inputs.by_module.items() if m in self.wanted.largest},
            {
                module: one.squares.cpu()
                for module, one in inputs.by_module.items()
                if module in self.wanted.squares and one.squares is not None
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
        solved: dict[str, Solved],
        equalized: Mapping[str, Equalized],
        scales: Mapping[str, Tensor],
    ) -> tuple[float, float] | None:
        """Learn the rounding of what is `solved`, in place; the layer's error before and after."""
        if not (self.wanted.learning_steps and solved and self.original_after):
            return None

        if torch.cuda.is_available():
            # What solving took stays reserved otherwise, in blocks that learning does not fit into.
            torch.cuda.empty_cache()

        def problem(module: str) -> Problem:
            return solver.problem(module, inputs.by_module[module], scales.get(module))

        learned = learn_rounding(
            self.stream,
            self.name,
            self.places,
            {module: one.quantized.weight for module, one in solved.items()},
            equalized,
            lambda module, weight: (solver.levels(module, weight), problem(module).target),
            self.original_after,
            self.wanted.learning_steps,
        )
        if learned is None:
            return None
        for module, weight in learned.weights.items():
            solved[module] = problem(module).judged(weight, solved[module])
        return learned.before, learned.after


def _unreached(
    checkpoint: Checkpoint, missing: Sequence[LinearWeight], found: Mapping[str, float]
) -> dict[str, float]:
    """For experts that no token reached, the largest of their kind in the same layer."""
    kinds: dict[str, float] = {}
    for module, largest in found.items():
        kinds[kind_of(module)] = max(largest, kinds.get(kind_of(module), 0.0))
    for one in missing:
        if kind_of(one.module) not in kinds:
            raise UserError(
                f"{checkpoint.source}: the inputs of {one.module} were not seen while the model ran; give "
                f"the recipe a rule `modules: '{one.module}'` with `activations: false`"
            )
    return {one.module: kinds[kind_of(one.module)] for one in missing}
