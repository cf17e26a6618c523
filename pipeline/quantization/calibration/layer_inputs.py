"""Sums over the inputs of one decoder layer's linear weights while a text is read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...model_loader.hidden_states import HiddenStates
from ...model_loader.layer_stream import InputObserver, LayerStream, Slot
from ...model_loader.linear_weights import LM_HEAD
from ...model_loader.weight_places import Places, kind_of
from ..solvers.equalization import NormOutputs
from .calibration_needs import CalibrationNeeds

LAST = "output projection"
"""The name under which the output projection counts as a layer of its own."""


@dataclass
class Inputs:
    """Sums over the inputs that several linear layers share.

    most:    the largest magnitude, as a tensor on the inputs' device, since reading it would wait for a GPU
    hessian: fp32 [K, K], the sum of x xᵀ, if a weight is solved; tokens: the number of inputs
    paired:  fp32 [K, K], the sum of x₀ xᵀ, x₀ being the inputs of the original model
    """

    most: Tensor | None = None
    squares: Tensor | None = None
    hessian: Tensor | None = None
    paired: Tensor | None = None
    tokens: int = 0

    @property
    def largest(self) -> float:
        return 0.0 if self.most is None else float(self.most)

    @property
    def cross(self) -> Tensor | None:
        """Return fp32 [K, K], the sum of (x₀ - x) xᵀ, where x are the inputs and x₀ the original model's
        inputs.
        """
        return None if self.paired is None or self.hessian is None else self.paired - self.hessian

    def see(self, x: Tensor, wants_squares: bool, wants_hessian: bool) -> None:
        most = x.abs().amax()
        self.most = most if self.most is None else torch.maximum(self.most, most)
        self.tokens += x.numel() // x.shape[-1]
        if wants_squares:
            squares = x.flatten(0, -2).float().square().sum(0, dtype=torch.float64)
            self.squares = squares if self.squares is None else self.squares + squares
        if wants_hessian:
            if self.hessian is None:
                self.hessian = x.new_zeros(x.shape[-1], x.shape[-1], dtype=torch.float32)
            _add_products(self.hessian, x, x)

    def see_original(self, original: Tensor, x: Tensor) -> None:
        """Add the inputs that the original model has in place of `x`."""
        if self.paired is None:
            self.paired = x.new_zeros(x.shape[-1], x.shape[-1], dtype=torch.float32)
        _add_products(self.paired, original, x)


@dataclass
class LayerInputs:
    """The statistics of the layer `name`, or of the output (LAST); `read` fills in the rest."""

    stream: LayerStream
    original: HiddenStates | None
    """The original model's hidden states before this layer; None unless weights are solved."""
    name: str
    places: Places
    needs: CalibrationNeeds
    by_module: dict[str, Inputs] = field(default_factory=dict)
    solving: list[str] = field(default_factory=list)
    """Modules whose weights are to be solved."""
    scarce: list[str] = field(default_factory=list)
    """Experts among these modules that were reached by fewer tokens than they have inputs."""
    original_after: HiddenStates | None = None
    """The original model's hidden states after this layer."""
    read_norms: dict[str, list[Slot]] = field(default_factory=dict)
    """For each norm in the layer, the linear layers that read its output."""

    def read(self) -> None:
        self.by_module = self._of_last() if self.name == LAST else self._of_layer()
        self.solving = [module for module in self.by_module if module in self.needs.solved]
        self.scarce = self._share_where_scarce(self.by_module, self.solving)

    def _of_layer(self) -> dict[str, Inputs]:
        layer = self.stream.place(self.name)
        self.original_after = None if self.original is None else self.stream.empty_states()
        seen: dict[str, Inputs] = {}
        sums: dict[Slot, Inputs] = {}
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
                modules = [
                    m for other in leaders if leaders[other] == leader for m in self.places.modules(other)
                ]
                if modules:
                    self._see(sums.setdefault(leader, Inputs()), x, modules)
                # An expert's inputs are other tokens where its router decides otherwise.
                if slot in originals and slot[1] is None and self.needs.solves(modules):
                    sums[leader].see_original(originals[slot], x)
        self.stream.drop(self.name)
        for slot, leader in leaders.items():
            seen |= dict.fromkeys(self.places.modules(slot), sums[leader]) if leader in sums else {}
        return seen

    def _of_last(self) -> dict[str, Inputs]:
        modules = [linear.module for linear in self.places.linears.values() if linear.role == LM_HEAD]
        sums = Inputs()
        for hidden in self.stream.outputs():
            self._see(sums, hidden, modules)
        return dict.fromkeys(modules, sums)

    def _see(self, sums: Inputs, x: Tensor, modules: Iterable[str]) -> None:
        needs = self.needs
        sums.see(
            x,
            any(module in needs.squares for module in modules),
            needs.solves(modules),
        )

    def _share_where_scarce(self, inputs: dict[str, Inputs], solving: list[str]) -> list[str]:
        """Give experts with too few tokens the statistics of their neighbours as well; return the names of
        these experts.
        """
        missing = [m for m in self.places.of_layer(self.name) if m in self.needs.solved and m not in inputs]
        for module in missing:
            inputs[module] = Inputs()
            solving.append(module)
        scarce = [
            module
            for module in solving
            if inputs[module].tokens < self.places.linears[module].k and kind_of(module) != module
        ]
        kinds: dict[str, Tensor] = {}
        for module in dict.fromkeys(map(kind_of, scarce)):
            all_of_it = {
                id(sums): sums.hessian
                for name, sums in inputs.items()
                if kind_of(name) == module and sums.hessian is not None
            }
            if all_of_it:
                kinds[module] = torch.stack(list(all_of_it.values())).sum(0)
        for module in scarce:
            together = kinds.get(kind_of(module))
            inputs[module] = replace(inputs[module], hessian=together)
        return scarce


def _add_products(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the sum of l rᵀ over rows l, r of [..., K] to fp32 [K, K]."""
    # Numbers that are bf16 may be multiplied as such: their products and sums are fp32 all the same.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if right.dtype == torch.bfloat16 else before)
    sums.addmm_(left.flatten(0, -2).float().T, right.flatten(0, -2).float())
    torch.set_float32_matmul_precision(before)


def _with_one_input(here: Mapping[Slot, Tensor]) -> dict[Slot, Slot]:
    """Return, for each linear layer, the first layer that got the same input tensor."""
    first: dict[tuple[int, tuple[int, ...]], Slot] = {}
    return {slot: first.setdefault((x.data_ptr(), tuple(x.shape)), slot) for slot, x in here.items()}
