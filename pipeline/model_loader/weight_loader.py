"""Putting a checkpoint's weights into the skeleton of its model, one at a time, quantized linears packed.

`conventions/` recognizes tensors, and `weight_map.py` finds their places in the model.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...base.batch_invariance import BatchInvariance
from ...base.errors import UserError
from ...base.progress import progress_bar
from ...layouts.choosing.choose import default_layout, forced_for, refuse_impossible
from ...layouts.choosing.plan import LayoutPlan
from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.weight_format import Weight, merge_rows, rows_by_turns
from ...layouts.modules.experts import ExpertsPart, PackedExperts, stack_inputs
from ...layouts.modules.linear import QuantizedLinear
from ...layouts.modules.merged_linear import merge_unquantized, put_merged
from ...layouts.packing.all_layouts import LAYOUTS
from ...layouts.packing.layout import ExpertsLayout, Layout, Problem
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.decoded_tensors import DecodedTensor
from ..checkpoints.float_source import FLOAT8, is_scale, read_whole
from ..conventions.convention import StoredWeight
from .device_reader import DeviceReader
from .merge_groups import merged_alike, plain_kinds
from .products import DenseProduct, ExpertsProduct, Product, find_products
from .weight_map import Assignment, foreign_roots, map_weights

WEIGHT = ".weight"
NAMES_IN_AN_ERROR = 5


@dataclass
class LayoutPicker:
    """Picks a problem's layout: the one that the user named, the plan's, or the default."""

    plan: LayoutPlan | None
    forced: str | None

    def pick(self, problem: Problem) -> str:
        forced = forced_for(self.forced, problem)
        if forced is not None:
            return forced
        planned = self.plan.layout_for(problem) if self.plan else None
        # A plan may come from another machine, whose layouts are not all here.
        if planned is not None and planned in LAYOUTS and LAYOUTS[planned].refuses(problem) is None:
            return planned
        return default_layout(problem)


@dataclass
class WeightLoader:
    """The state of loading one model: sources of weights, their places, and which are loaded."""

    checkpoint: Checkpoint
    modules: dict[str, StoredWeight]
    model: PreTrainedModel
    device: torch.device
    picker: LayoutPicker
    merge_groups: list[list[str]] = field(default_factory=list)
    """Linear layers of the model that get the same input."""
    batch_invariance: BatchInvariance = "tuned"
    rounded_elsewhere: bool = False
    """Whether the caller rounds the inputs of plain layers, as `inputs_of` says."""
    layouts: dict[str, str] = field(default_factory=dict)
    """The layout of every packed product, by the product's name."""
    problems: dict[str, Problem] = field(default_factory=dict)
    """The problem for which each of these layouts was picked."""
    filled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.stored = {module + WEIGHT: weight for module, weight in self.modules.items()}

    def assignments(self) -> list[Assignment]:
        """Return every weight's place in the model; UserError if a weight has none."""
        mapped = map_weights(self.model, names_to_place(self.checkpoint, self.modules))
        if mapped.unexpected and foreign_roots(self.model, mapped.unexpected) is None:
            raise UserError(
                f"{self.checkpoint.source}: {listed(mapped.unexpected)} in the checkpoint, but "
                f"{type(self.model).__name__} has no such weight; the config does not describe these files"
            )
        self._refuse_missing(mapped.missing)
        return mapped.assignments

    def products(self) -> list[Product]:
        """Return every product to be packed, merged as it will be served."""
        return find_products(
            self.checkpoint, self.stored, self.assignments(), self.model, self.merge_groups, self.device
        )

    def load(self, progress: bool) -> None:
        products = self.products()
        if self.picker.forced is not None and products:
            refuse_impossible(
                self.picker.forced, {product.name: self._problem(product) for product in products}
            )
        packed = {name for product in products for name in product.weights}
        plain = [item for item in self.assignments() if not packed.issuperset(item.names)]
        total = len(plain) + len(products)
        bar = progress_bar(total=total, desc="loading", unit=" weights", shown=progress, leave=False)
        experts: dict[str, dict[str, list[ExpertsPart]]] = {}
        with bar, DeviceReader(self.device) if self.device.type == "cuda" else nullcontext() as reader:
            # Biases before packed weights: a packed linear takes its bias along when it replaces the old one.
            for assignment in plain:
                self.place_plain(assignment, reader)
                bar.update()
            for product in products:
                if isinstance(product, DenseProduct):
                    self._place_dense(product)
                else:
                    leaves = experts.setdefault(product.module, {})
                    leaves.setdefault(product.parameter, []).append(self._pack_experts(product))
                bar.update()
        for module, leaves in experts.items():
            self._place_experts(module, leaves)
        self.tie()
        merge_unquantized(self.model, merged_alike(self.merge_groups, plain_kinds(self.model)))
        self._refuse_missing([name for name, tensor in self.model.state_dict().items() if tensor.is_meta])

    def _refuse_missing(self, missing: list[str]) -> None:
        if missing:
            raise UserError(
                f"{self.checkpoint.source}: {listed(missing)} missing from the checkpoint, and "
                f"{type(self.model).__name__} needs it"
            )

    def _place_dense(self, product: DenseProduct) -> None:
        linears = [self.model.get_submodule(module) for module in product.modules]
        biases = []
        for linear, name in zip(linears, product.weights, strict=True):
            if not isinstance(linear, nn.Linear):
                raise TypeError(f"{name} is for a {type(linear).__name__}; only a Linear can be packed")
            self._check_shape(name, self.stored[name].shape, (linear.out_features, linear.in_features))
            biases += [] if linear.bias is None else [linear.bias.data]
        weight = self._merged(product.weights)
        layout = cast(Layout, self._pick(product))
        packed = layout.pack(weight.to(self.device), self.model.dtype)
        bias = torch.cat(biases) if biases else None
        replacement = QuantizedLinear(packed, bias, self._read_input(product.weights[0]))
        if len(product.modules) == 1:
            self.model.set_submodule(product.modules[0], replacement)
        else:
            put_merged(self.model, product.modules, replacement)

    def _pack_experts(self, product: ExpertsProduct) -> ExpertsPart:
        self._check_experts(product)
        layout = cast(ExpertsLayout, self._pick(product))
        weights = [self._merged(parts, product.interleaved).to(self.device) for parts in product.experts]
        packed = layout.pack_experts(weights, self.model.dtype)
        inputs = [found for parts in product.experts if (found := self._read_input(parts[0])) is not None]
        return ExpertsPart(packed, stack_inputs(inputs) if inputs else None)

    def _place_experts(self, name: str, products: Mapping[str, list[ExpertsPart]]) -> None:
        self.model.set_submodule(
            name, PackedExperts(self.model.get_submodule(name), products, self.batch_invariance)
        )

    def _pick(self, product: Product) -> object:
        problem = self.problems[product.name] = self._problem(product)
        name = self.picker.pick(problem)
        self.layouts[product.name] = name
        return LAYOUTS[name]

    def _problem(self, product: Product) -> Problem:
        return product.problem(self.stored, self.model.dtype, self.device, self.batch_invariance)

    def _merged(self, names: Sequence[str], interleaved: bool = False) -> Weight:
        """Return the weights' rows one after another, or alternating, on the CPU."""
        merged = merge_rows([self._read_quantized(name) for name in names])
        if merged is None:
            raise TypeError(f"{listed(list(names))} are of different formats or do not share their scales")
        return rows_by_turns(merged, len(names)) if interleaved else merged

    def _read_input(self, name: str) -> InputFormat | None:
        read = self.stored[name].read_input
        if read is None:
            return None
        found = read()
        return found.with_tensors({key: tensor.to(self.device) for key, tensor in found.tensors().items()})

    def inputs_of(self, assignment: Assignment) -> list[list[tuple[int, InputFormat]]]:
        """Return, for the linear layer or for each expert, the rows of each part and how the part's input is
        rounded.

        The result is empty if no input is rounded. Raise UserError if a weight with a rounded input is
        neither a linear layer's nor an expert's.
        """
        names = [name for name in assignment.names if name in self.stored and self.stored[name].read_input]
        if not names:
            return []
        slices = assignment.expert_parts()
        if slices is None:
            module = self.model.get_submodule(assignment.target.rpartition(".")[0])
            if assignment.converter is not None or not isinstance(module, nn.Linear):
                raise self._no_linear(names[0])
            slices = [names]
        return [
            [
                (self.stored[name].shape[0], rounding)
                for name in parts
                if (rounding := self._read_input(name)) is not None
            ]
            for parts in slices
        ]

    def _no_linear(self, name: str) -> UserError:
        return UserError(
            f"{self.checkpoint.source}: {name} quantizes its input too. Scalegate quantizes the inputs of "
            f"linear layers and experts only, and in {type(self.model).__name__} this layer is neither"
        )

    def _read_quantized(self, name: str) -> Weight:
        weight = self.stored[name].read()
        if isinstance(weight, Tensor):
            raise TypeError(f"{name} is declared as quantized and read as a plain tensor")
        return weight

    def _read_plain(self, name: str, reader: DeviceReader | None = None) -> Tensor:
        if name not in self.stored:
            info = self.checkpoint.tensors[name]
            if reader is None or info.dtype in FLOAT8 or isinstance(info, DecodedTensor):
                return read_whole(self.checkpoint, name)
            return reader.read(info)
        if self.stored[name].read_input is not None and not self.rounded_elsewhere:
            raise self._no_linear(name)
        weight = self.stored[name].read()
        return weight if isinstance(weight, Tensor) else weight.dequantize(self.model.dtype)

    def place_plain(self, assignment: Assignment, reader: DeviceReader | None = None) -> None:
        """Put an unquantized weight in its place.

        reader: for tensors that go to the device unchanged; others are put together on the CPU first
        """
        if assignment.converter is None:
            names = assignment.names
            experts = assignment.expert_parts()
            if experts is None:
                value = self._read_plain(names[0], reader)
            else:
                slices = [[self._read_plain(name) for name in parts] for parts in experts]
                value = self._stack_slices(assignment.target, slices, assignment.interleaved)
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

    def _stack_slices(self, target: str, experts: list[list[Tensor]], interleaved: bool) -> Tensor:
        """Stack weights [N, K] of single experts to the 3-D parameter, transposed if the model stores it so,
        or their biases [N] to the 2-D parameter.

        experts: for each, the weights that are stacked or interleaved in its slice
        """
        expected = tuple(self.model.get_parameter(target).shape)
        slices = [torch.cat(parts) for parts in experts]
        if interleaved:
            slices = [torch.stack(parts, dim=1).flatten(0, 1) for parts in experts]
        stacked = torch.stack(slices)
        if stacked.dim() == 2:
            return stacked
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

    def _check_shape(self, source: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise UserError(
                f"{self.checkpoint.source}: {source} has shape {list(found)}; "
                f"by the config it has to be {list(expected)}"
            )

    def _check_experts(self, product: ExpertsProduct) -> None:
        expected = tuple(self.model.get_parameter(f"{product.module}.{product.parameter}").shape)
        rows = product.rows(self.stored)
        slice_shape = (rows * product.parts_of_parameter, self.stored[product.experts[0][0]].shape[1])
        if slice_shape not in (expected[1:], expected[:0:-1]):
            self._check_shape(product.name, slice_shape, expected[1:])
        if len(product.experts) != expected[0]:
            raise UserError(
                f"{self.checkpoint.source}: {product.name} has {len(product.experts)} experts in the "
                f"checkpoint, but {expected[0]} by the config"
            )

    def tie(self) -> None:
        """Share the parameters that the architecture ties, unless the checkpoint has both parameters."""
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


def names_to_place(checkpoint: Checkpoint, stored: Mapping[str, StoredWeight]) -> list[str]:
    """Return the names of all weights: tensors, and packed weights in place of the tensors that store
    them.
    """
    consumed = {name for weight in stored.values() for name in weight.tensors}
    others = [name for name in checkpoint.tensors if name not in consumed]
    plain = [name for name in others if not is_scale(checkpoint, name)]
    return [*plain, *(module + WEIGHT for module in stored)]


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_IN_AN_ERROR])
    return shown if len(names) <= NAMES_IN_AN_ERROR else f"{shown} and {len(names) - NAMES_IN_AN_ERROR} more"
