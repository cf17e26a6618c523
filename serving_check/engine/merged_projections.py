"""Merged projections: one matrix product for linear layers with the same input (merged QKV, gate-up).

Which layers share an input is found by running the model, not by their names. Not for weights that no layout
can merge.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...layouts.layout import JoiningLayout
from ...layouts.linear import QuantizedLinear

Linear = nn.Linear | QuantizedLinear


@dataclass
class _Product:
    """The merged product of one call: computed by the first projection, released by the last."""

    input: Tensor | None = None
    output: Tensor | None = None


class MergedLinear(nn.Module):
    """One of several merged projections: its columns of the output of `merged`, which all of them hold."""

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


def merge_projections(model: nn.Module, run: Callable[[], object]) -> int:
    """Merge what can be merged, seeing in `run` which layers share an input; how many products that saves."""
    saved = 0
    modules = dict(model.named_modules())
    for names in _mergeable(model, run):
        parent = modules[names[0].rpartition(".")[0]]
        merged = _merged([modules[name] for name in names])
        if merged is None:
            continue
        saved += len(names) - 1
        product, start = _Product(), 0
        for name in names:
            stop = start + modules[name].out_features
            projection = MergedLinear(
                merged, product, slice(start, stop), name == names[0], name == names[-1]
            )
            setattr(parent, name.rpartition(".")[2], projection)
            modules[name] = projection  # Lets go of the separate weight before the next is made.
            start = stop
    return saved


def _mergeable(model: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Names of the children of one module that were each called once, one after another, on one tensor."""
    calls: list[tuple[str, Linear, Tensor]] = []
    # A subclass, a hook, a shared weight or an input to be rounded may mean more than a product does.
    plain = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) in (nn.Linear, QuantizedLinear)
        and getattr(module, "input_format", None) is None
        and not module._forward_hooks
        and not module._forward_pre_hooks
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
    groups: list[list[tuple[str, Linear, Tensor]]] = []
    for call in calls:
        if groups and _merges(groups[-1][-1], call):
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


def _merges(before: tuple[str, Linear, Tensor], call: tuple[str, Linear, Tensor]) -> bool:
    (name, module, x), (other_name, other, other_x) = before, call
    return (
        x is other_x
        and name.rpartition(".")[0] == other_name.rpartition(".")[0]
        and module is not other
        and type(module) is type(other)
        and (module.bias is None) == (other.bias is None)
    )


@torch.no_grad()
def _merged(linears: list[Linear]) -> Linear | None:
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    if isinstance(linears[0], QuantizedLinear):
        layout = linears[0].layout
        packed = [linear.packed for linear in linears if isinstance(linear, QuantizedLinear)]
        alike = len({(one.layout, one.dtype, tuple(one.meta.items())) for one in packed}) == 1
        weight = layout.join(packed) if alike and isinstance(layout, JoiningLayout) else None
        return None if weight is None else QuantizedLinear(weight, bias)
    weights: list[Tensor] = [linear.weight for linear in linears if isinstance(linear, nn.Linear)]
    if len({weight.dtype for weight in weights}) > 1:
        return None
    # On the meta device, so that nothing is initialized only to be overwritten.
    merged = nn.Linear(weights[0].shape[1], sum(map(len, weights)), bias=bias is not None, device="meta")
    merged.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if bias is not None:
        merged.bias = nn.Parameter(bias, requires_grad=False)
    return merged
