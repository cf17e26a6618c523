"""A mixture-of-experts layer whose experts are packed; stands where transformers' experts module stood.

Gating, biases, activations and norms stay the architecture's own: only the two products are replaced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, library, nn

from .all_layouts import LAYOUTS
from .errors import UserError
from .formats.input_format import InputFormat
from .formats.unquantized import Unquantized, UnquantizedWeight
from .grouped_experts import GroupedUnquantized
from .layout import ExpertsLayout, PackedWeight
from .linear import spec_of_text, spec_text
from .per_expert import PerExpert
from .routing import Routing
from .torch_linear import TorchLinear

INTERFACE = ("has_gate", "has_bias", "is_transposed")
"""What transformers' experts modules have in common, those that its ExpertsInterface can serve."""
PRODUCTS = ("gate_up_proj", "up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """Whether it is a transformers experts module, with its weights in 3-D parameters or replaced already."""
    return all(hasattr(module, name) for name in INTERFACE)


@dataclass(frozen=True)
class ExpertsPart:
    """A packed weight of all experts, and how each expert's input is rounded first; see `stack_inputs`."""

    packed: PackedWeight
    input_format: InputFormat | None = None


def stack_inputs(inputs: Sequence[InputFormat]) -> InputFormat:
    """One for all experts: its tensors are theirs, [E, 1, 1], and are picked for every row."""
    parts = [one.tensors() for one in inputs]
    return inputs[0].with_tensors(
        {name: torch.stack([p[name] for p in parts]).view(-1, 1, 1) for name in parts[0]}
    )


class PackedExperts(nn.Module):
    """`sum_j weight[t, j] * down(act(gate_up(x[t])))` over the experts j of token t, products packed.

    products: by the name of the parameter that it stands for, the parts whose outputs lie side by side: one
              as a rule, several where gate and up could not be merged. Parameters without stay unquantized
    """

    def __init__(self, experts: nn.Module, products: Mapping[str, Sequence[ExpertsPart]]):
        super().__init__()
        if not is_experts(experts):
            raise UserError(
                f"experts of {type(experts).__name__} cannot be packed: it does not follow transformers' "
                "experts interface"
            )
        self.experts = experts
        rest = {name: [_unquantized(experts, name)] for name in PRODUCTS if _is_left(experts, name, products)}
        self._products: dict[str, list[_Product]] = {}
        for name, parts in {**products, **rest}.items():
            delattr(experts, name)
            self._products[name] = [_Product(self, f"{name}_{i}", part) for i, part in enumerate(parts)]
        self.num_experts = self._products["down_proj"][0].packed.shape[0]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """[E, N, K] of each parameter that it stands for."""
        found: dict[str, tuple[int, ...]] = {}
        for name, parts in self._products.items():
            experts, _, k = parts[0].packed.shape
            found[name] = (experts, sum(part.packed.shape[1] for part in parts), k)
        return found

    @property
    def packed(self) -> dict[str, PackedWeight]:
        """What it holds now, after any move to another device, by product; several of one are numbered."""
        return {product.name: product.packed for parts in self._products.values() for product in parts}

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        for parts in self._products.values():
            for product in parts:
                product.refresh(self)
        return self

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index int [T, top_k], top_k_weights [T, top_k] to [T, H]."""
        experts: Any = self.experts
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        routing = route(top_k_index, self.num_experts)
        x = self._multiply(first, hidden_states, routing)
        x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
        x = self._multiply("down_proj", x, routing)
        if getattr(experts, "has_post_expert_norm", False):
            x = experts.post_expert_norm(x)
        per_choice = x.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        # Summed choice by choice, not scattered: the order of the additions does not depend on the batch.
        return per_choice.to(hidden_states.dtype).sum(dim=1)

    def _multiply(self, name: str, x: Tensor, routing: Routing) -> Tensor:
        outputs = [product(x, routing) for product in self._products[name]]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if self.experts.has_bias:
            y = y + getattr(self.experts, f"{name}_bias")[routing.expert.flatten()]
        return y


def _is_left(experts: nn.Module, name: str, products: Mapping[str, object]) -> bool:
    return name not in products and isinstance(getattr(experts, name, None), Tensor)


def _unquantized(experts: nn.Module, name: str) -> ExpertsPart:
    """A parameter's weights: on a GPU where they lie, for the grouped kernels."""
    weight = getattr(experts, name).data
    rows = weight.transpose(1, 2) if experts.is_transposed else weight
    if rows.device.type == "cuda":
        return ExpertsPart(GroupedUnquantized().of(rows))
    weights = [UnquantizedWeight(Unquantized(), one) for one in rows]
    return ExpertsPart(PerExpert(TorchLinear()).pack_experts(weights, rows.dtype))


def experts_shapes(experts: nn.Module) -> dict[str, tuple[int, ...]]:
    """[E, N, K] of the parameters of a transformers experts module."""
    found: dict[str, tuple[int, ...]] = {}
    for name in PRODUCTS:
        weight = getattr(experts, name, None)
        if isinstance(weight, Tensor):
            count, n, k = weight.transpose(1, 2).shape if experts.is_transposed else weight.shape
            found[name] = (count, n, k)
    return found


class _Product:
    """One packed weight of the module, whose buffers its tensors are."""

    def __init__(self, module: nn.Module, name: str, part: ExpertsPart):
        packed = part.packed
        self.name = name
        self.packed = packed
        self.input_format = part.input_format
        self.layout = cast(ExpertsLayout, LAYOUTS[packed.layout])
        self.spec = spec_text(packed.spec)
        for tensor_name, tensor in packed.tensors.items():
            module.register_buffer(f"{name}_{tensor_name}", tensor, persistent=False)
        if part.input_format is not None:
            for tensor_name, tensor in part.input_format.tensors().items():
                module.register_buffer(f"{name}_input_{tensor_name}", tensor, persistent=False)

    def refresh(self, module: nn.Module) -> None:
        tensors = {name: getattr(module, f"{self.name}_{name}") for name in self.packed.tensors}
        self.packed = replace(self.packed, tensors=tensors)
        if self.input_format is not None:
            names = self.input_format.tensors()
            moved = {name: getattr(module, f"{self.name}_input_{name}") for name in names}
            self.input_format = self.input_format.with_tensors(moved)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        packed = self.packed
        if self.input_format is not None:
            expert = routing.expert.flatten()
            of_row = {name: tensor[expert] for name, tensor in self.input_format.tensors().items()}
            rows = x.repeat_interleave(len(expert) // max(1, len(x)), dim=0)
            x = self.input_format.with_tensors(of_row).round(rows)
        if not torch.compiler.is_compiling():
            return self.layout.grouped_matmul(x.contiguous(), packed, routing)
        return torch.ops.scalegate.packed_experts_matmul(
            x.contiguous(),
            routing.expert,
            routing.buffer,
            list(packed.tensors.values()),
            packed.layout,
            self.spec,
            list(packed.shape),
            " ".join(packed.tensors),
            " ".join(packed.attributes),
            list(packed.attributes.values()),
        )


def route(expert: Tensor, count: int) -> Routing:
    """Sort the assignments of `expert`, int [T, top_k], to `count` experts: once for a layer's products."""
    if torch.compiler.is_compiling():
        return Routing(expert, count, torch.ops.scalegate.route_experts(expert, count))
    return Routing.of(expert, count)


@library.custom_op("scalegate::route_experts", mutates_args=())
def _route_experts(expert: Tensor, count: int) -> Tensor:
    return Routing.of(expert, count).buffer


@_route_experts.register_fake
def _(expert: Tensor, count: int) -> Tensor:
    return expert.new_empty(Routing.buffer_size(expert, count), dtype=torch.int32)


@library.custom_op("scalegate::packed_experts_matmul", mutates_args=())
def _packed_experts_matmul(
    x: Tensor,
    expert: Tensor,
    buffer: Tensor,
    tensors: list[Tensor],
    layout: str,
    spec: str,
    shape: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
) -> Tensor:
    """x [R, K] → [T * top_k, N]; as `packed_matmul`, whose conventions it keeps."""
    packed = PackedWeight(
        layout,
        spec_of_text(spec),
        tuple(shape),
        x.dtype,
        dict(zip(names.split(), tensors, strict=True)),
        dict(zip(attribute_names.split(), attributes, strict=True)),
    )
    routing = Routing(expert, shape[0], buffer)
    return cast(ExpertsLayout, LAYOUTS[layout]).grouped_matmul(x, packed, routing)


@_packed_experts_matmul.register_fake
def _(
    x: Tensor,
    expert: Tensor,
    buffer: Tensor,
    tensors: list[Tensor],
    layout: str,
    spec: str,
    shape: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
) -> Tensor:
    return x.new_empty(expert.shape[0] * expert.shape[1], shape[1])
