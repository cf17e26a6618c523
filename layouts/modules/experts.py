"""The experts of a mixture-of-experts layer, packed; replaces transformers' experts module.

Only the two products of the module are replaced. Gating, biases, activations and norms stay as the
architecture defines them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, library, nn

from ...base.batch_invariance import BatchInvariance
from ...base.errors import UserError
from ..formats.input_format import InputFormat, dynamic_input
from ..formats.unquantized import Unquantized, UnquantizedWeight
from ..packing.all_layouts import LAYOUTS
from ..packing.fixed_rows import FixedRows
from ..packing.grouped_experts import GroupedUnquantized
from ..packing.layout import ExpertsLayout, PackedWeight, rounds_inputs
from ..packing.per_expert import PerExpert
from ..packing.routing import Routing
from ..packing.torch_linear import TorchLinear
from .experts_interface import adapt, rows_of_experts, without_identities
from .gated_experts import gated_experts, is_served_whole
from .linear import spec_of_text, spec_text

INTERFACE = ("has_gate", "has_bias", "is_transposed")
"""Attributes of every experts module that transformers' ExpertsInterface can serve."""
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""The names of the experts' weights, which are [E, N, K] or, transposed, [E, K, N]."""


@dataclass(frozen=True)
class ExpertsPart:
    """A packed weight of all experts, and how each expert's input is rounded first (`stack_inputs`)."""

    packed: PackedWeight
    input_format: InputFormat | None = None


class PackedExperts(nn.Module):
    """Computes `sum_j weight[t, j] * down(act(gate_up(x[t])))` over the experts j of token t, with packed
    products.

    products: for each parameter, the parts whose outputs are concatenated: usually one, several if gate and
              up could not be merged. Parameters that are not named stay unquantized
    """

    def __init__(
        self,
        experts: nn.Module,
        products: Mapping[str, Sequence[ExpertsPart]],
        batch_invariance: BatchInvariance = "tuned",
    ):
        super().__init__()
        self.batch_invariance = batch_invariance
        if not is_experts(experts) and not adapt(experts):
            raise UserError(
                f"experts of {type(experts).__name__} cannot be packed: it does not follow transformers' "
                "experts interface"
            )
        self.experts = experts
        self.parts: dict[str, list[str]] = {}
        """The names of the parts of each parameter."""
        self.specs: dict[str, str] = {}
        self.input_formats: dict[str, InputFormat] = {}
        self._packed: dict[str, PackedWeight] = {}
        rest = {
            name: [_unquantized(experts, name, batch_invariance)]
            for name in parameters_of(experts)
            if name not in products
        }
        for name, parts in {**products, **rest}.items():
            delattr(experts, name)
            self.parts[name] = [f"{name}_{index}" for index in range(len(parts))]
            for part_name, part in zip(self.parts[name], parts, strict=True):
                self._add(part_name, part)
        self.num_experts = self._packed[self.parts["down_proj"][0]].shape[0]
        self._counts = {packed.shape[0] for packed in self._packed.values()}
        weights = {name: [self._packed[part] for part in parts] for name, parts in self.parts.items()}
        self.is_served_whole = (
            batch_invariance == "tuned" and not self.input_formats and is_served_whole(experts, weights)
        )

    def _add(self, name: str, part: ExpertsPart) -> None:
        self._packed[name] = part.packed
        self.specs[name] = spec_text(part.packed.spec)
        for tensor_name, tensor in part.packed.tensors.items():
            self.register_buffer(f"{name}_{tensor_name}", tensor, persistent=False)
        rounding = part.input_format or dynamic_input(part.packed.spec)
        if rounding is not None and not rounds_inputs(LAYOUTS[part.packed.layout]):
            self.input_formats[name] = rounding
            for tensor_name, tensor in rounding.tensors().items():
                self.register_buffer(f"{name}_input_{tensor_name}", tensor, persistent=False)

    @property
    def packed(self) -> dict[str, PackedWeight]:
        """Return the packed weights by part, on the device that the module is on now."""
        return self._packed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape [E, N, K] of each parameter that is packed."""
        found: dict[str, tuple[int, ...]] = {}
        for name, parts in self.parts.items():
            shapes = [self._packed[part].shape for part in parts]
            found[name] = (shapes[0][0], sum(n for _, n, _ in shapes), shapes[0][2])
        return found

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        for name, packed in self._packed.items():
            tensors = {tensor: getattr(self, f"{name}_{tensor}") for tensor in packed.tensors}
            self._packed[name] = replace(packed, tensors=tensors)
        for name, rounding in self.input_formats.items():
            tensors = {tensor: getattr(self, f"{name}_input_{tensor}") for tensor in rounding.tensors()}
            self.input_formats[name] = rounding.with_tensors(tensors)
        return self

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """Compute hidden_states [T, H], top_k_index int [T, top_k] and top_k_weights [T, top_k] to [T, H].

        Without an index, hidden_states [E * T, H] hold T rows for each expert in turn, and so does the result
        [E * T, H].
        """
        if top_k_index is None or top_k_weights is None:
            rows, expert = rows_of_experts(hidden_states, self.num_experts)
            ones = hidden_states.new_ones(len(rows), 1)
            output = torch.zeros_like(hidden_states)
            if len(rows):
                output[rows] = self._routed(hidden_states[rows], expert[:, None], ones)
            return output
        index, weights, added = without_identities(self.experts, hidden_states, top_k_index, top_k_weights)
        output = self._routed(hidden_states, index, weights)
        return output if added is None else output + added

    def _routed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.is_served_whole:
            gate_up, down = self.parts["gate_up_proj"][0], self.parts["down_proj"][0]
            weights, specs = (
                (self._packed[gate_up], self._packed[down]),
                (self.specs[gate_up], self.specs[down]),
            )
            return gated_experts(hidden_states, top_k_index, top_k_weights, weights, specs)
        experts: Any = self.experts
        sorted_experts = {
            count: torch.ops.scalegate.route_experts(top_k_index, count, self.batch_invariance)
            for count in self._counts
        }
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        x = self._multiply(first, hidden_states, top_k_index, sorted_experts)
        x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
        x = self._multiply("down_proj", x, top_k_index, sorted_experts)
        if getattr(experts, "has_post_expert_norm", False):
            x = experts.post_expert_norm(x)
        per_choice = x.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        # Summed choice by choice, not scattered: the order of the additions does not depend on the batch.
        return per_choice.to(hidden_states.dtype).sum(dim=1)

    def _multiply(self, name: str, x: Tensor, expert: Tensor, sorted_experts: dict[int, Tensor]) -> Tensor:
        outputs = [self._product(part, x, expert, sorted_experts) for part in self.parts[name]]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if self.experts.has_bias:
            y = y + getattr(self.experts, f"{name}_bias")[expert.flatten()]
        return y

    def _product(self, part: str, x: Tensor, expert: Tensor, sorted_experts: dict[int, Tensor]) -> Tensor:
        packed = self._packed[part]
        if part in self.input_formats:
            x = _rounded(self.input_formats[part], x, expert.flatten())
        return torch.ops.scalegate.packed_experts_matmul(
            x.contiguous(),
            expert,
            sorted_experts[packed.shape[0]],
            list(packed.tensors.values()),
            packed.layout,
            self.specs[part],
            list(packed.shape),
            " ".join(packed.tensors),
            " ".join(packed.attributes),
            list(packed.attributes.values()),
            self.batch_invariance,
        )


def is_experts(module: nn.Module) -> bool:
    """Say whether the module is an experts module of transformers that transformers' ExpertsInterface can
    serve.
    """
    return all(hasattr(module, name) for name in INTERFACE)


def parameters_of(experts: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a transformers experts module still has, as views [E, N, K]."""
    found = {}
    for name in PARAMETERS:
        weight = experts._parameters.get(name)
        if weight is not None:
            found[name] = weight.data.transpose(1, 2) if experts.is_transposed else weight.data
    return found


def pack_unquantized_experts(model: nn.Module, batch_invariance: BatchInvariance = "tuned") -> int:
    """Replace a model's own experts modules without copying their weights; return how many.

    GPUs need packed experts, since a CUDA graph cannot contain a product that asks the host which experts are
    used. Batch-invariant serving needs them on any device.
    """
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    own = {name: module for name, module in found.items() if parameters_of(module)}
    for name, module in own.items():
        model.set_submodule(name, PackedExperts(module, {}, batch_invariance))
    return len(own)


def stack_inputs(inputs: Sequence[InputFormat]) -> InputFormat:
    """Stack the experts' input formats to one format. The format's tensors are [E, 1, 1], to be indexed by
    each row's expert.
    """
    parts = [input_format.tensors() for input_format in inputs]
    stacked = {name: torch.stack([part[name] for part in parts]).view(-1, 1, 1) for name in parts[0]}
    return inputs[0].with_tensors(stacked)


def _rounded(rounding: InputFormat, x: Tensor, expert: Tensor) -> Tensor:
    """Return a row of x for every assignment in `expert` [A], rounded by that expert's input format."""
    of_row = {name: tensor[expert] for name, tensor in rounding.tensors().items()}
    if not of_row:
        return rounding.round(x)
    rows = x.repeat_interleave(expert.shape[0] // x.shape[0], dim=0)
    return rounding.with_tensors(of_row).round(rows)


def _unquantized(experts: nn.Module, name: str, batch_invariance: BatchInvariance) -> ExpertsPart:
    rows = parameters_of(experts)[name]
    if rows.device.type == "cuda":
        return ExpertsPart(GroupedUnquantized().of(rows))
    weights = [UnquantizedWeight(Unquantized(), weight) for weight in rows]
    dense = TorchLinear() if batch_invariance == "tuned" else FixedRows(TorchLinear())
    return ExpertsPart(PerExpert(dense).pack_experts(weights, rows.dtype))


@library.custom_op("scalegate::route_experts", mutates_args=())
def _route_experts(expert: Tensor, count: int, batch_invariance: str) -> Tensor:
    """Sort the assignments of `expert`, int [T, top_k], by expert: once for all products of a layer."""
    return Routing.of(expert, count, cast(BatchInvariance, batch_invariance)).buffer


@_route_experts.register_fake
def _(expert: Tensor, count: int, batch_invariance: str) -> Tensor:
    return expert.new_empty(Routing.buffer_size(expert, count), dtype=torch.int32)


@library.custom_op("scalegate::packed_experts_matmul", mutates_args=())
def _packed_experts_matmul(
    x: Tensor,
    expert: Tensor,
    sorted_experts: Tensor,
    tensors: list[Tensor],
    layout: str,
    spec: str,
    shape: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
    batch_invariance: str,
) -> Tensor:
    """Multiply x [R, K] to [T * top_k, N]; arguments are those of `packed_matmul`."""
    packed = PackedWeight(
        layout,
        spec_of_text(spec),
        tuple(shape),
        x.dtype,
        dict(zip(names.split(), tensors, strict=True)),
        dict(zip(attribute_names.split(), attributes, strict=True)),
    )
    routing = Routing(expert, shape[0], sorted_experts, cast(BatchInvariance, batch_invariance))
    return cast(ExpertsLayout, LAYOUTS[layout]).grouped_matmul(x, packed, routing)


@_packed_experts_matmul.register_fake
def _(
    x: Tensor,
    expert: Tensor,
    sorted_experts: Tensor,
    tensors: list[Tensor],
    layout: str,
    spec: str,
    shape: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
    batch_invariance: str,
) -> Tensor:
    return x.new_empty(expert.shape[0] * expert.shape[1], shape[1])
