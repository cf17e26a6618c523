"""The packed products of a checkpoint's model: dense layers that share an input are merged, experts are
stacked.

Layouts are measured for the packed products and serve them; plans and reports use the products' names.
Weights are read in `weight_loader.py`; this file reads only scales that decide about merging.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel

from ...base.batch_invariance import BatchInvariance
from ...base.errors import UserError
from ...layouts.modules.merged_linear import merged_name
from ...layouts.packing.layout import Experts, Problem
from ..checkpoints.checkpoint import Checkpoint
from ..conventions.convention import StoredWeight
from .merge_groups import merged_alike
from .weight_map import Assignment
from .weights_read import multiplies

TOP_K = (
    "num_experts_per_tok",
    "top_k",
    "top_k_experts",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
"""The names, in configs and routers, of the number of experts per token."""
Stored = Mapping[str, StoredWeight]
"""Stored weights by their names in the checkpoint."""


@dataclass(frozen=True)
class DenseProduct:
    """One product of one or several linear layers.

    modules: linear layers of the model, in the order of their rows
    weights: their weights in the checkpoint
    """

    modules: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def name(self) -> str:
        return merged_name(self.modules)

    def problem(
        self, stored: Stored, dtype: torch.dtype, device: torch.device, batch_invariance: BatchInvariance
    ) -> Problem:
        first = stored[self.weights[0]]
        rows = sum(stored[name].shape[0] for name in self.weights)
        return Problem(first.spec, rows, first.shape[1], dtype, device, None, batch_invariance)


@dataclass(frozen=True)
class ExpertsProduct:
    """One product of all experts of a layer.

    module, parameter:  the experts module and its 3-D parameter that this product replaces
    experts:            for each expert the weights whose rows lie one after another
    top_k:              experts that each token takes
    part:               its index if one parameter makes several products; see `parts_of_parameter`
    parts_of_parameter: how many products replace the parameter: two if gate and up cannot be merged
    interleaved:        whether the rows of an expert's weights alternate
    """

    module: str
    parameter: str
    experts: tuple[tuple[str, ...], ...]
    top_k: int
    part: int = 0
    parts_of_parameter: int = 1
    interleaved: bool = False

    @property
    def name(self) -> str:
        suffix = f"[{self.part}]" if self.parts_of_parameter > 1 else ""
        return f"{self.module}.{self.parameter}{suffix}"

    @property
    def weights(self) -> list[str]:
        return list(chain.from_iterable(self.experts))

    def rows(self, stored: Stored) -> int:
        return sum(stored[name].shape[0] for name in self.experts[0])

    def problem(
        self, stored: Stored, dtype: torch.dtype, device: torch.device, batch_invariance: BatchInvariance
    ) -> Problem:
        first = stored[self.experts[0][0]]
        experts = Experts(len(self.experts), self.top_k)
        return Problem(
            first.spec, self.rows(stored), first.shape[1], dtype, device, experts, batch_invariance
        )


Product = DenseProduct | ExpertsProduct


def find_products(
    checkpoint: Checkpoint,
    stored: Stored,
    assignments: Sequence[Assignment],
    model: PreTrainedModel,
    merge_groups: list[list[str]],
    device: torch.device,
) -> list[Product]:
    """Return every product of the model whose weights are quantized, in the order of the checkpoint.

    Weights that can only be plain tensors in the model (an embedding, a merge that is not row-wise) are
    excluded: such weights are dequantized into place.
    """
    products: list[Product] = []
    linears: dict[str, str] = {}
    for assignment in assignments:
        if not all(name in stored and stored[name].is_quantized for name in assignment.names):
            continue
        experts = assignment.expert_parts()
        module, _, leaf = assignment.target.rpartition(".")
        if experts is not None:
            products += _experts_products(
                checkpoint, stored, model, module, leaf, experts, assignment.interleaved
            )
        elif assignment.converter is None and _is_product(model.get_submodule(module)):
            linears[module] = assignment.names[0]
    kinds = {
        module: _dense_kind(checkpoint, stored[name], model.get_submodule(module))
        for module, name in linears.items()
    }
    groups = merged_alike(merge_groups, kinds)
    grouped = {module: names for names in groups for module in names}
    for module in linears:
        names = grouped.get(module, [module])
        if names[0] == module:
            products.append(DenseProduct(tuple(names), tuple(linears[name] for name in names)))
    return products


def _is_product(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and multiplies(module)


def _kind(checkpoint: Checkpoint, stored: StoredWeight) -> object:
    """Return the properties that merged weights must share: format, shared scales, rounding of the input."""
    shared = tuple(tuple(checkpoint.read(name).flatten().tolist()) for name in stored.shared)
    if stored.read_input is None:
        return stored.spec, shared
    rounding = stored.read_input()
    scales = tuple(tuple(tensor.flatten().tolist()) for tensor in rounding.tensors().values())
    return stored.spec, shared, rounding.label, scales


def _dense_kind(checkpoint: Checkpoint, stored: StoredWeight, linear: nn.Module) -> object:
    """Return the properties that merged linear layers must share."""
    return _kind(checkpoint, stored), getattr(linear, "bias", None) is None


def _experts_products(
    checkpoint: Checkpoint,
    stored: Stored,
    model: PreTrainedModel,
    module: str,
    parameter: str,
    experts: list[list[str]],
    interleaved: bool,
) -> list[Product]:
    forms = {
        tuple((stored[name].spec, stored[name].shape, stored[name].read_input is None) for name in parts)
        for parts in experts
    }
    if len(forms) > 1:
        raise UserError(
            f"{checkpoint.source}: the experts of {module}.{parameter} differ in format or shape; experts of "
            "one layer are multiplied together, so give them one format"
        )
    top_k = _top_k(checkpoint, model, module)
    merges = all(len({_kind(checkpoint, stored[name]) for name in parts}) == 1 for parts in experts)
    if merges:
        together = tuple(map(tuple, experts))
        return [ExpertsProduct(module, parameter, together, top_k, interleaved=interleaved)]
    if interleaved:
        raise UserError(
            f"{checkpoint.source}: {module}.{parameter} interleaves the rows of {experts[0][0]} and "
            f"{experts[0][1]}, but their formats or shared scales differ; give them one format"
        )
    count = len(experts[0])
    return [
        ExpertsProduct(module, parameter, tuple((parts[i],) for parts in experts), top_k, i, count)
        for i in range(count)
    ]


def _top_k(checkpoint: Checkpoint, model: PreTrainedModel, experts: str) -> int:
    """Return the number of experts that a token is routed to: from the config, or from the modules around the
    experts.
    """
    config = model.config.get_text_config(decoder=True)
    parent = model.get_submodule(experts.rpartition(".")[0])
    for owner in (config, parent, *parent.children()):
        for name in TOP_K:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    raise UserError(
        f"{checkpoint.source}: its config does not say how many experts of {experts} each token uses"
    )
