"""One matrix product for linear layers that share an input: merged QKV, merged gate and up.

Layers that share an input are found by running the model, not by their names. Weights are merged while they
are loaded, before layouts are timed, so that the timed products are the served ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from .linear import QuantizedLinear

Linear = nn.Linear | QuantizedLinear
SEPARATOR = "+"


@dataclass
class _Product:
    """The product of one call: the first of the merged layers computes it, the last one releases it."""

    input: Tensor | None = None
    output: Tensor | None = None


class MergedLinear(nn.Module):
    """One of several merged linear layers, which returns its rows of their product. They all share
    `merged`.
    """

    def __init__(self, merged: Linear, product: _Product, rows: slice, is_first: bool, is_last: bool):
        super().__init__()
        self.merged = merged
        self.product = product
        self.rows = rows
        self.is_first, self.is_last = is_first, is_last
        self.in_features, self.out_features = merged.in_features, rows.stop - rows.start

    @property
    def weight(self) -> Tensor:
        if not isinstance(self.merged, nn.Linear):
            raise AttributeError("a packed weight has no rows to show")
        return self.merged.weight[self.rows]

    @property
    def bias(self) -> Tensor | None:
        return None if self.merged.bias is None else self.merged.bias[self.rows]

    def forward(self, x: Tensor) -> Tensor:
        product = self.product
        if self.is_first:
            product.input, product.output = x, self.merged(x)
        if product.output is None or product.input is not x:
            raise RuntimeError("linear layers that shared an input no longer do")
        output = product.output[..., self.rows]
        if self.is_last:
            product.input = product.output = None
        return output


def merged_name(names: Sequence[str]) -> str:
    """Return the name of merged layers in plans and reports:
    `model.layers.0.self_attn.q_proj+k_proj+v_proj`.
    """
    parent = names[0].rpartition(".")[0]
    leaves = SEPARATOR.join(name.rpartition(".")[2] for name in names)
    return f"{parent}.{leaves}" if parent else leaves


def layers_of(name: str) -> int:
    """Return how many linear layers are merged under a name."""
    return name.count(SEPARATOR) + 1


def put_merged(model: nn.Module, names: Sequence[str], merged: Linear) -> None:
    """Replace the named layers by their rows of `merged`, which has the rows of all, one after another."""
    product, start = _Product(), 0
    for name in names:
        stop = start + int(cast(Linear, model.get_submodule(name)).out_features)
        layer = MergedLinear(merged, product, slice(start, stop), name == names[0], name == names[-1])
        model.set_submodule(name, layer)
        start = stop


@torch.no_grad()
def merge_unquantized(model: nn.Module, groups: Sequence[Sequence[str]]) -> int:
    """Merge the groups whose layers are all plain `nn.Linear`; return how many products that saves."""
    fewer = 0
    for names in groups:
        linears = [model.get_submodule(name) for name in names]
        if all(type(linear) is nn.Linear for linear in linears):
            merged = _concatenated(linears)  # type: ignore[arg-type]
            if merged is not None:
                put_merged(model, names, merged)
                fewer += len(names) - 1
    return fewer


def _concatenated(linears: Sequence[nn.Linear]) -> nn.Linear | None:
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)) or len({linear.weight.dtype for linear in linears}) > 1:
        return None
    # On the meta device, so that nothing is initialized only to be overwritten.
    rows = sum(linear.out_features for linear in linears)
    merged = nn.Linear(linears[0].in_features, rows, bias=bool(biases), device="meta")
    merged.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if biases:
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return merged


def layers_with_one_input(model: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Find groups of linear layers, by name, that share an input.

    A group's layers are children of one module and are called once each, one after another, with one tensor.

    run: one forward pass of the model, on any device
    """
    calls: list[tuple[str, nn.Linear, Tensor]] = []
    # A subclass, a hook or a shared weight may mean more than a product does.
    plain = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks
    }
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: calls.append((name, module, args[0]))
        )
        for name, module in plain.items()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[tuple[str, nn.Linear, Tensor]]] = []
    for call in calls:
        if groups and _share_input(groups[-1][-1], call):
            groups[-1].append(call)
        else:
            groups.append([call])
    names = [name for name, _, _ in calls]
    once = {name for name in names if names.count(name) == 1}
    return [
        [name for name, _, _ in group]
        for group in groups
        if len(group) > 1 and all(name in once for name, _, _ in group)
    ]


def _share_input(before: tuple[str, nn.Linear, Tensor], call: tuple[str, nn.Linear, Tensor]) -> bool:
    (name, module, x), (other_name, other, other_x) = before, call
    return x is other_x and name.rpartition(".")[0] == other_name.rpartition(".")[0] and module is not other
