"""Putting a checkpoint's weights into the skeleton of its model, one at a time, quantized linears packed.

Not for deciding what a checkpoint holds (`conventions/`) nor what goes where (`weight_map.py`).
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from ...layouts import all_layouts  # noqa: F401 - registers them
from ...layouts.choose import default_layout
from ...layouts.errors import UserError
from ...layouts.layout import LAYOUTS, Problem, QuantizedWeight
from ...layouts.linear import QuantizedLinear
from ...layouts.nvfp4 import NVFP4Input
from ...layouts.plan import LayoutPlan
from ..checkpoints.checkpoint import Checkpoint
from ..conventions.convention import StoredWeight
from .device_reader import DeviceReader
from .quantized_experts import QuantizedExperts, stack_rows
from .weight_map import Assignment, map_weights

WEIGHT = ".weight"
NAMES_IN_AN_ERROR = 5


@dataclass
class LayoutPicker:
    """Which layout a problem gets: the one that was asked for, the plan's, or the default."""

    plan: LayoutPlan | None
    forced: str | None

    def pick(self, problem: Problem, module: str) -> str:
        if self.forced is not None:
            reason = LAYOUTS[self.forced].refuses(problem)
            if reason is not None:
                raise UserError(f"layout {self.forced!r} does not serve {module}: {reason}")
            return self.forced
        planned = self.plan.layout_for(problem) if self.plan else None
        # A plan may come from another machine, whose layouts are not all here.
        if planned is not None and planned in LAYOUTS and LAYOUTS[planned].refuses(problem) is None:
            return planned
        return default_layout(problem)


@dataclass
class WeightLoader:
    """The state of one load: where weights come from, where they go, and what is there already."""

    checkpoint: Checkpoint
    modules: dict[str, StoredWeight]
    model: PreTrainedModel
    device: torch.device
    picker: LayoutPicker
    layouts: dict[str, str] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    plain_modules: dict[str, str] = field(default_factory=dict)
    """Linears that got an unquantized weight: name in the model to name in the checkpoint."""

    def __post_init__(self) -> None:
        self.stored = {module + WEIGHT: weight for module, weight in self.modules.items()}

    def assignments(self) -> list[Assignment]:
        """Every weight's place in the model; UserError where a weight has none."""
        consumed = {name for weight in self.stored.values() for name in weight.tensors}
        names = [name for name in self.checkpoint.tensors if name not in consumed] + list(self.stored)
        mapped = map_weights(self.model, names)
        if mapped.unexpected:
            raise UserError(
                f"{self.checkpoint.source}: {listed(mapped.unexpected)} in the checkpoint, but "
                f"{type(self.model).__name__} has no such weight; the config does not describe these files"
            )
        self._refuse_missing(mapped.missing)
        return mapped.assignments

    def load(self, progress: bool) -> None:
        # Biases before quantized weights: a packed linear takes its bias along when it replaces the old one.
        assignments = sorted(self.assignments(), key=lambda a: any(name in self.stored for name in a.names))
        bar = tqdm(assignments, "loading", unit=" weights", disable=None if progress else True, leave=False)
        with DeviceReader(self.device) if self.device.type == "cuda" else nullcontext() as reader:
            for assignment in bar:
                if list(self.quantized_modules(assignment)):
                    self._place_quantized(assignment)
                else:
                    self._place_plain(assignment, reader)
        self._tie()
        self._refuse_missing([name for name, tensor in self.model.state_dict().items() if tensor.is_meta])

    def _refuse_missing(self, missing: list[str]) -> None:
        if missing:
            raise UserError(
                f"{self.checkpoint.source}: {listed(missing)} missing from the checkpoint, and "
                f"{type(self.model).__name__} needs it"
            )

    def quantized_modules(self, assignment: Assignment) -> Iterator[tuple[str, list[str]]]:
        """The packed linears this assignment makes, by name, each with the weights whose rows it stacks.

        Nothing where the weights are plain, or go where only a plain tensor can (an embedding, a merge that
        is not row-wise): those are dequantized into place.
        """
        if not all(name in self.stored and self.stored[name].is_quantized for name in assignment.names):
            return
        experts = assignment.expert_parts()
        if experts is not None:
            module, _, projection = assignment.target.rpartition(".")
            for index, parts in enumerate(experts):
                yield f"{module}.{index}.{projection}", parts
        elif assignment.converter is None and assignment.target.endswith(WEIGHT):
            module = assignment.target.removesuffix(WEIGHT)
            if isinstance(self.model.get_submodule(module), nn.Linear):
                yield module, assignment.names

    def _place_quantized(self, assignment: Assignment) -> None:
        parent_name, _, leaf = assignment.target.rpartition(".")
        if assignment.expert_parts() is not None:
            experts = self.model.get_submodule(parent_name)
            if not isinstance(experts, QuantizedExperts):
                experts = QuantizedExperts(experts)
                self.model.set_submodule(parent_name, experts)
            self._check_experts(assignment, tuple(getattr(experts.experts, leaf).shape))
            packed = [
                self._linears(module, parts, None) for module, parts in self.quantized_modules(assignment)
            ]
            experts.set_packed(leaf, packed)
            return
        (module, parts), = self.quantized_modules(assignment)  # fmt: skip
        linear = self.model.get_submodule(module)
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{module} is a {type(linear).__name__}; only a Linear can be packed")
        self._check_shape(parts[0], self.stored[parts[0]].shape, (linear.out_features, linear.in_features))
        bias = linear.bias.data if linear.bias is not None else None
        (replacement,) = self._linears(module, parts, bias)
        self.model.set_submodule(module, replacement)

    def _linears(self, module: str, parts: list[str], bias: Tensor | None) -> list[QuantizedLinear]:
        weights = [self._read_quantized(name) for name in parts]
        inputs = [self._read_input(name) for name in parts]
        if all(one == inputs[0] for one in inputs):
            weights = stack_rows(weights)
        linears = []
        for weight, input_format in zip(weights, inputs, strict=False):
            problem = Problem.of(weight, self.model.dtype, self.device)
            name = self.picker.pick(problem, module)
            packed = LAYOUTS[name].pack(weight.to(self.device), self.model.dtype)
            linears.append(QuantizedLinear(packed, bias, input_format))
            self.layouts[module] = name
        return linears

    def _read_input(self, name: str) -> NVFP4Input | None:
        read = self.stored[name].read_input
        return None if read is None else read().to(self.device)

    def _read_quantized(self, name: str) -> QuantizedWeight:
        weight = self.stored[name].read()
        if isinstance(weight, Tensor):
            raise TypeError(f"{name} is declared as quantized and read as a plain tensor")
        return weight

    def _read_plain(self, name: str, reader: DeviceReader | None = None) -> Tensor:
        if name not in self.stored:
            return (
                self.checkpoint.read(name) if reader is None else reader.read(self.checkpoint.tensors[name])
            )
        if self.stored[name].read_input is not None:
            raise UserError(
                f"{self.checkpoint.source}: {name} quantizes its input as well, which Scalegate does for "
                f"linear layers and experts only, and {type(self.model).__name__} makes something else of it"
            )
        weight = self.stored[name].read()
        return weight if isinstance(weight, Tensor) else weight.dequantize(self.model.dtype)

    def _place_plain(self, assignment: Assignment, reader: DeviceReader | None) -> None:
        """reader: for what goes to the device as it is; what is put together first is so on the CPU."""
        if assignment.converter is None:
            names = assignment.names
            if assignment.expert_parts() is None:
                value = self._read_plain(names[0], reader)
            else:
                value = self._stack_slices(assignment.target, [self._read_plain(name) for name in names])
            self._set(assignment.target, value, names[0])
            return
        converter = assignment.converter
        for pattern, names in assignment.sources.items():
            for name in names:
                converter.add_tensor(assignment.target, name, pattern, self._read_plain(name))  # type: ignore
        try:
            converted = converter.convert(assignment.target, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.checkpoint.source}: {listed(assignment.names)} cannot be merged into "
                f"{assignment.target}: {error}"
            ) from error
        for target, value in converted.items():
            self._set(target, value[0] if isinstance(value, list) else value, assignment.names[0])

    def _stack_slices(self, target: str, tensors: list[Tensor]) -> Tensor:
        """[N, K] weights of single experts to the 3-D parameter, transposed where the model wants that."""
        expected = tuple(self.model.get_parameter(target).shape)
        stacked = torch.stack(tensors)
        return stacked if tuple(stacked.shape) == expected else stacked.transpose(1, 2).contiguous()

    def _set(self, target: str, value: Tensor, source: str) -> None:
        module_name, _, leaf = target.rpartition(".")
        module = self.model.get_submodule(module_name)
        current = getattr(module, leaf)
        self._check_shape(source, tuple(value.shape), tuple(current.shape))
        if value.is_floating_point() != current.is_floating_point():
            found = str(value.dtype).removeprefix("torch.")
            raise UserError(
                f"{self.checkpoint.source}: tensor {source} has dtype {found}, and the model's {target} is "
                f"{str(current.dtype).removeprefix('torch.')}; nothing in the config says how to read it"
            )
        value = value.to(self.device, current.dtype)
        if isinstance(current, nn.Parameter):
            setattr(module, leaf, nn.Parameter(value, requires_grad=False))
        else:
            module._buffers[leaf] = value
        self.filled.add(target)
        if isinstance(module, nn.Linear) and leaf == "weight":
            self.plain_modules[module_name] = source.removesuffix(WEIGHT)

    def _check_shape(self, source: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise UserError(
                f"{self.checkpoint.source}: {source} has shape {list(found)}; "
                f"the config makes it {list(expected)}"
            )

    def _check_experts(self, assignment: Assignment, expected: tuple[int, ...]) -> None:
        experts = assignment.expert_parts() or []
        for parts in experts:
            shapes = [self.stored[name].shape for name in parts]
            slice_shape = (sum(n for n, _ in shapes), shapes[0][1])
            if slice_shape not in (expected[1:], expected[:0:-1]):
                self._check_shape(" + ".join(parts), slice_shape, expected[1:])
        if len(experts) != expected[0]:
            raise UserError(
                f"{self.checkpoint.source}: {assignment.target} has {len(experts)} experts in the "
                f"checkpoint; the config makes it {expected[0]}"
            )

    def _tie(self) -> None:
        """Share the parameters the architecture ties, unless the checkpoint brought both of its own."""
        for target, source in self.model.all_tied_weights_keys.items():
            here, there = self._lookup(target), self._lookup(source)
            if here is not None and here.is_meta and there is not None and not there.is_meta:
                self._share(target, there)
            elif there is not None and there.is_meta and here is not None and not here.is_meta:
                self._share(source, here)

    def _lookup(self, name: str) -> nn.Parameter | None:
        module, _, leaf = name.rpartition(".")
        return self.model.get_submodule(module)._parameters.get(leaf)

    def _share(self, name: str, parameter: nn.Parameter) -> None:
        module, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(module), leaf, parameter)


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_IN_AN_ERROR])
    return shown if len(names) <= NAMES_IN_AN_ERROR else f"{shown} and {len(names) - NAMES_IN_AN_ERROR} more"
