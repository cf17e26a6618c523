"""The pass over a text in which calibrated quantizers learn what they need, one decoder layer at a time.

Each layer is read, looked into, solved where its quantizer asks for that, and left with the weights that
will be served, so that the next layer's inputs are those it will get. Where weights are solved, the text
goes through the original layers beside that, and each weight is asked for what the original makes of its
own inputs, half of the way (after GPTAQ: Li et al. 2025, arXiv 2504.02692; all of the way fits the text
more than the model). What was found of a layer is a file in the work folder: an interrupted job solves
no layer again.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ...layouts.errors import UserError
from ...layouts.formats.unquantized import Unquantized
from ...layouts.formats.weight_format import Weight
from ..checkpoints.checkpoint import Checkpoint
from ..conventions.convention import StoredWeight
from ..model_loader.weight_map import Assignment
from .all_quantizers import QUANTIZERS
from .calibrated_layer import CalibratedLayer, Equalized, Solved, layer_path, read_layer, write_layer
from .equalization import TOLERANCE, NormOutputs, column_scales, energy, scaled_norm
from .hidden_states import HiddenStates
from .layer_stream import InputObserver, LayerStream, Slot
from .linear_weights import LM_HEAD, LinearWeight
from .quantizer import CorrectingQuantizer, Quantized
from .second_order import Curvature, prepare
from .shared_tensors import Shared
from .tasks import WeightTask
from .weight_tensors import WeightQuantizer, read_linear, refuse_non_finite

CORRECTED = 0.5
"""The share of earlier layers' error that a layer makes up for: on a development split of 5M, KL 0.0208
at none of it, 0.0190 at half and 0.0204 at all."""
LAST = "output projection"
"""What comes after the decoder layers, as a layer of its own."""


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

    def solves(self, modules: Iterable[str]) -> bool:
        return any(module in self.solved for module in modules)

    def __bool__(self) -> bool:
        return bool(self.largest or self.squares or self.solved)


@dataclass
class Found:
    """What a pass has found, by module.

    largest: of experts that no token reaches, the largest of their layer's
    squares: float64 [K]; an expert that no token reaches has none
    scarce:  experts with fewer tokens than they have inputs: solved with all of their layer's in view
    equalized: norms whose weights have taken over scales, by tensor
    """

    largest: dict[str, float] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    solved: dict[str, Solved] = field(default_factory=dict)
    scarce: list[str] = field(default_factory=list)
    equalized: dict[str, Equalized] = field(default_factory=dict)

    def add(self, layer: CalibratedLayer) -> None:
        self.largest |= layer.largest
        self.squares |= layer.squares
        self.solved |= layer.solved
        self.scarce += layer.scarce
        self.equalized |= layer.equalized


@dataclass
class _Inputs:
    """Sums over the inputs that some linears have in common.

    hessian: fp32 [K, K], the sum of x xᵀ, where a weight is solved; tokens: how many inputs there were
    cross:   fp32 [K, K], the sum of (x₀ - x) xᵀ, x₀ being the inputs of the original model
    """

    largest: float = 0.0
    squares: Tensor | None = None
    hessian: Tensor | None = None
    cross: Tensor | None = None
    tokens: int = 0

    def see(self, x: Tensor, wants_squares: bool, wants_hessian: bool) -> None:
        self.largest = max(self.largest, float(x.abs().amax()))
        rows = x.flatten(0, -2).float()
        self.tokens += len(rows)
        if wants_squares:
            squares = rows.square().sum(0, dtype=torch.float64)
            self.squares = squares if self.squares is None else self.squares + squares
        if wants_hessian:
            if self.hessian is None:
                self.hessian = rows.new_zeros(rows.shape[1], rows.shape[1])
            self.hessian.addmm_(rows.T, rows)

    def see_original(self, original: Tensor, x: Tensor) -> None:
        """The inputs that the original model has in the place of `x`."""
        rows = x.flatten(0, -2).float()
        difference = original.flatten(0, -2).float() - rows
        if self.cross is None:
            self.cross = rows.new_zeros(rows.shape[1], rows.shape[1])
        self.cross.addmm_(difference.T, rows)


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
        with tqdm(
            total=len(names), desc="calibrating", unit=" layers", disable=None if progress else True
        ) as bar:
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
                found.add(layer)
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
    missing = [one for one in linears if one.module in wanted.largest and one.module not in found.largest]
    found.largest |= _unreached(checkpoint, missing, found.largest)
    return found


class Places:
    """Where in the model each linear weight is multiplied by."""

    def __init__(self, assignments: Sequence[Assignment], linears: Sequence[LinearWeight]):
        self.linears = {one.module: one for one in linears}
        by_tensor: dict[str, list[LinearWeight]] = defaultdict(list)
        for linear in linears:
            by_tensor[linear.tensor].append(linear)
        self.by_slot: dict[Slot, list[LinearWeight]] = defaultdict(list)
        for assignment in assignments:
            experts = assignment.expert_parts()
            names = (
                dict.fromkeys(assignment.names)
                if experts is None
                else {name: index for index, parts in enumerate(experts) for name in parts}
            )
            for name, expert in names.items():
                for linear in by_tensor.get(name, []):
                    which = expert if linear.expert is None else linear.expert
                    self.by_slot[assignment.target, which].append(linear)

    def modules(self, slot: Slot) -> list[str]:
        return [linear.module for linear in self.by_slot.get(slot, [])]

    def of_layer(self, name: str) -> list[str]:
        slots = [slot for slot in self.by_slot if slot[0].startswith(f"{name}.")]
        return [module for slot in slots for module in self.modules(slot)]


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
    read_norms: dict[str, list[Slot]] = field(default_factory=dict)
    """By norm within the layer, the linears that read what it gives."""

    def look(self) -> CalibratedLayer:
        inputs = self._outputs_seen() if self.name == LAST else self._inputs_seen()
        solving = [module for module in inputs if module in self.wanted.solved]
        scarce = self._share_where_scarce(inputs, solving)
        equalized, scales = self._equalize(inputs) if self.wanted.equalizes else ({}, {})
        solved = self._solve(inputs, solving, scales)
        return CalibratedLayer(
            {module: one.largest for module, one in inputs.items() if module in self.wanted.largest},
            {
                module: one.squares.cpu()
                for module, one in inputs.items()
                if module in self.wanted.squares and one.squares is not None
            },
            solved,
            scarce,
            equalized,
        )

    def _inputs_seen(self) -> dict[str, _Inputs]:
        layer = self.stream.place(self.name)
        self.original_after = None if self.original is None else self.stream.empty_states()
        seen: dict[str, _Inputs] = {}
        sums: dict[Slot, _Inputs] = {}
        leaders: dict[Slot, Slot] = {}
        for start in self.stream.starts():
            here: dict[Slot, Tensor] = {}
            with NormOutputs(layer) as norms, InputObserver(self.name, layer, here.__setitem__):
                output = self.stream.run(self.name, start)
            originals: dict[Slot, Tensor] = {}
            if self.original is not None and self.original is not self.stream.states:
                with InputObserver(self.name, layer, originals.__setitem__):
                    output = self.stream.run(self.name, start, self.original)
            if self.original_after is not None:
                self.original_after.write(start, output)
            if not leaders:
                leaders = _with_one_input(here)
                for slot, x in here.items():
                    norm = norms.norm_of(x)
                    if norm is not None:
                        self.read_norms.setdefault(norm, []).append(slot)
            for slot, x in here.items():
                leader = leaders.setdefault(slot, slot)
                # Experts are reached by some of the text only, each by its own tokens.
                if leader != slot and leader in here:
                    continue
                modules = [m for one in leaders if leaders[one] == leader for m in self.places.modules(one)]
                if modules:
                    self._see(sums.setdefault(leader, _Inputs()), x, modules)
                # An expert's inputs are other tokens where its router decides otherwise.
                if slot in originals and slot[1] is None and self.wanted.solves(modules):
                    sums[leader].see_original(originals[slot], x)
        self.stream.drop(self.name)
        for slot, leader in leaders.items():
            seen |= dict.fromkeys(self.places.modules(slot), sums[leader]) if leader in sums else {}
        return seen

    def _outputs_seen(self) -> dict[str, _Inputs]:
        modules = [one.module for one in self.places.linears.values() if one.role == LM_HEAD]
        sums = _Inputs()
        for hidden in self.stream.outputs():
            self._see(sums, hidden, modules)
        return dict.fromkeys(modules, sums)

    def _see(self, sums: _Inputs, x: Tensor, modules: Iterable[str]) -> None:
        wanted = self.wanted
        sums.see(
            x,
            any(module in wanted.squares for module in modules),
            wanted.solves(modules),
        )

    def _share_where_scarce(self, inputs: dict[str, _Inputs], solving: list[str]) -> list[str]:
        """Give experts with too few tokens what their neighbours have seen as well; their names."""
        missing = [m for m in self.places.of_layer(self.name) if m in self.wanted.solved and m not in inputs]
        for module in missing:
            inputs[module] = _Inputs()
            solving.append(module)
        scarce = [
            module
            for module in solving
            if inputs[module].tokens < self.places.linears[module].k and kind_of(module) != module
        ]
        kinds: dict[str, Tensor] = {}
        for module in dict.fromkeys(map(kind_of, scarce)):
            all_of_it = {
                id(one): one.hessian
                for name, one in inputs.items()
                if kind_of(name) == module and one.hessian is not None
            }
            if all_of_it:
                kinds[module] = torch.stack(list(all_of_it.values())).sum(0)
        for module in scarce:
            together = kinds.get(kind_of(module))
            inputs[module] = replace(inputs[module], hessian=together)
        return scarce

    def _equalize(self, inputs: Mapping[str, _Inputs]) -> tuple[dict[str, Equalized], dict[str, Tensor]]:
        """Norms with scales taken over, and those, fp32 [K], by the module that has them in its columns."""
        equalized: dict[str, Equalized] = {}
        scales: dict[str, Tensor] = {}
        for norm, slots in self.read_norms.items():
            tensor = self.stream.tensor_of(f"{self.name}.{norm}.weight")
            modules = [module for slot in slots for module in self.places.modules(slot)]
            if tensor is None or not all(self._may_scale(slot) for slot in slots):
                continue
            hessian = inputs[modules[0]].hessian
            if hessian is None:
                continue
            weight = self.stream.checkpoint.read(tensor).to(self.quantizer.device)
            weights = [self._values(module).float() for module in modules]
            rounds = [partial(self._rounded, module) for module in modules]
            divided = scaled_norm(weight, hessian, weights, rounds)
            if divided is not None:
                equalized[tensor] = Equalized(divided.cpu(), tuple(modules))
                scales |= dict.fromkeys(modules, column_scales(weight, divided))
        return (equalized, scales) if self._computes_the_same(equalized, scales) else ({}, {})

    def _may_scale(self, slot: Slot) -> bool:
        """Whether all of that parameter is one weight that is solved."""
        linears = self.places.by_slot.get(slot, [])
        whole = len(linears) == 1 and linears[0].expert is None and linears[0].rows is None
        return whole and linears[0].module in self.wanted.solved and not linears[0].transposed

    def _computes_the_same(self, equalized: Mapping[str, Equalized], scales: Mapping[str, Tensor]) -> bool:
        """Whether the layer's outputs stay what they were, unrounded: a norm may be another than it looks."""
        if not equalized:
            return True
        self.stream.place(self.name)
        hidden = self.stream.hidden(0).float()
        expected = self.stream.run(self.name, 0).float()
        for tensor, norm in equalized.items():
            self.stream.put(tensor, norm.weight)
        for module, columns in scales.items():
            scaled = self._values(module).float() * columns
            self.stream.put(self.places.linears[module].tensor, scaled)
        found = self.stream.run(self.name, 0).float()
        self.stream.drop(self.name)
        rounding = torch.finfo(self.stream.model.dtype).eps / 2 * expected.norm()
        return bool((found - expected).norm() <= TOLERANCE * (expected - hidden).norm() + rounding)

    def _values(self, module: str) -> Tensor:
        """The weight [N, K] as the checkpoint has it. UserError where it holds a NaN or an infinity."""
        linear = self.places.linears[module]
        values = read_linear(self.stream.checkpoint, linear, 0, linear.n).to(self.quantizer.device)
        refuse_non_finite(self.stream.checkpoint, linear.tensor, values)
        return values

    def _rounded(self, module: str, values: Tensor) -> Tensor:
        return self._plain(module, values).weight.dequantize(torch.float32)

    def _plain(self, module: str, values: Tensor) -> Quantized:
        """Rounded by itself."""
        spec = self.wanted.solved[module].spec
        return QUANTIZERS[spec.name].quantize(values, spec, self.quantizer.scale_dtype, self._shared(module))

    def _shared(self, module: str) -> dict[str, Tensor]:
        return {name: t.to(self.quantizer.device) for name, t in self.shared.get(module, {}).items()}

    def _solve(
        self, inputs: Mapping[str, _Inputs], solving: Sequence[str], scales: Mapping[str, Tensor]
    ) -> dict[str, Solved]:
        """scales: fp32 [K] of the columns, by module, where a norm has taken them over"""
        solved: dict[str, Solved] = {}
        curvatures: dict[tuple[int, int, int, int], Curvature] = {}
        for module in solving:
            task, linear = self.wanted.solved[module], self.places.linears[module]
            corrector = QUANTIZERS[task.spec.name]
            if not isinstance(corrector, CorrectingQuantizer):
                raise TypeError(f"{task.spec.name} cannot be solved on a text")
            hessian = inputs[module].hessian
            cross = inputs[module].cross if self.wanted.corrects else None
            columns = scales.get(module)
            key = (id(hessian), id(columns), corrector.columns_together(task.spec), linear.k)
            if hessian is None:
                hessian = torch.eye(linear.k, device=self.quantizer.device)
            if key not in curvatures:
                curvatures[key] = prepare(_divided(hessian, columns), key[2])
            values = self._values(module)
            unscaled, before = values, None
            if columns is not None:
                values = values.float() * columns
                cross = None if cross is None else _divided(cross, columns)
            target = _target(values.float(), cross, curvatures[key])
            if columns is not None:
                before = _share_of_output(self._rounded(module, unscaled), target / columns, hessian)
            candidates = [self._plain(module, values)]
            if self.wanted.corrects:
                dtype, shared = self.quantizer.scale_dtype, self._shared(module)
                candidates.append(corrector.correct(target, task.spec, dtype, shared, curvatures[key]))
            solved[module] = Solved.of(values.float(), target, candidates, curvatures[key], before)
        return solved


def _share_of_output(values: Tensor, target: Tensor, hessian: Tensor) -> float:
    """The squared error of `values`' outputs, as a share of the square of `target`'s; fp32 [N, K] both."""
    whole = energy(target, hessian)
    return energy(values - target, hessian) / whole if whole else 0.0


def _divided(sums: Tensor, columns: Tensor | None) -> Tensor:
    """Sums over inputs [K, K] as they are where the inputs are divided by `columns` [K]."""
    return sums if columns is None else sums / columns[:, None] / columns[None, :]


def _target(weight: Tensor, cross: Tensor | None, curvature: Curvature) -> Tensor:
    """fp32 [N, K]: `weight`, moved to make up for what its inputs have lost: W + half of W cross H⁻¹."""
    if cross is None:
        return weight
    order = curvature.order
    wanted = (weight @ cross)[:, order]
    factor = torch.linalg.cholesky(curvature.matrix.double())
    moved = torch.cholesky_solve(wanted.T.double(), factor).T.float()
    return weight + CORRECTED * torch.empty_like(moved).index_copy_(1, order, moved)


def _with_one_input(here: Mapping[Slot, Tensor]) -> dict[Slot, Slot]:
    """By linear, the first of those that were given the same tensor."""
    first: dict[tuple[int, tuple[int, ...]], Slot] = {}
    return {slot: first.setdefault((x.data_ptr(), tuple(x.shape)), slot) for slot, x in here.items()}


@contextmanager
def serve(stream: LayerStream, weights: Mapping[str, Weight], places: Places) -> Iterator[None]:
    """Within it, the loader puts `weights`, by module, in the place of those on disk."""
    by_tensor: dict[str, list[tuple[LinearWeight, Weight]]] = defaultdict(list)
    for module, weight in weights.items():
        linear = places.linears[module]
        by_tensor[linear.tensor].append((linear, weight))
    before = dict(stream.loader.stored)
    for tensor, parts in by_tensor.items():
        linear = parts[0][0]
        stream.loader.stored[tensor] = StoredWeight(
            linear.module,
            (linear.n, linear.k),
            Unquantized(),
            (tensor,),
            partial(_patched, stream, tensor, parts),
        )
    yield
    stream.loader.stored = before


def _patched(stream: LayerStream, tensor: str, parts: Sequence[tuple[LinearWeight, Weight]]) -> Tensor:
    """A checkpoint's tensor with solved weights in their places."""
    whole = stream.checkpoint.read(tensor)
    if len(parts) == 1 and parts[0][0].expert is None and parts[0][0].rows is None:
        return parts[0][1].dequantize(stream.model.dtype)
    for linear, weight in parts:
        part = whole if linear.expert is None else whole[linear.expert]
        lying = part.T if linear.transposed else part
        rows = slice(*linear.rows) if linear.rows else slice(None)
        lying[rows] = weight.dequantize(whole.dtype)
    return whole


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


def kind_of(module: str) -> str:
    """An expert's name with its number, which comes after the layer's, left out; any other name as it is."""
    parts = module.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(part for index, part in enumerate(parts) if index not in numbers[1:])
