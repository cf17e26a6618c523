"""One matrix product for linear layers that are given the same input: q, k and v; gate and up.

Which they are is found by running the model, not by their names. Not for weights that a layout has packed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class _Product:
    """The product under way: computed by the first sibling, let go of by the last."""

    input: Tensor | None = None
    output: Tensor | None = None


class SiblingLinear(nn.Module):
    """One of several `nn.Linear` modules: its rows of their joint product.

    `joint_weight` [sum of N, K] and `joint_bias` are the same parameters in every sibling.
    """

    def __init__(self, joint: nn.Linear, product: _Product, rows: slice, is_first: bool, is_last: bool):
        super().__init__()
        self.joint_weight, self.joint_bias = joint.weight, joint.bias
        self.product = product
        self.rows = rows
        self.is_first, self.is_last = is_first, is_last
        self.in_features, self.out_features = joint.in_features, rows.stop - rows.start

    @property
    def weight(self) -> Tensor:
        return self.joint_weight[self.rows]

    @property
    def bias(self) -> Tensor | None:
        return None if self.joint_bias is None else self.joint_bias[self.rows]

    def forward(self, x: Tensor) -> Tensor:
        product = self.product
        if self.is_first:
            product.input, product.output = x, functional.linear(x, self.joint_weight, self.joint_bias)
        if product.output is None or product.input is not x:
            raise RuntimeError("linear layers that shared an input no longer do")
        output = product.output[..., self.rows]
        if self.is_last:
            product.input = product.output = None
        return output


def join_siblings(model: nn.Module, run: Callable[[], object]) -> int:
    """Join what can be joined, watching what the linear layers are given in `run`; how many products less."""
    groups = _siblings(model, run)
    parents = dict(model.named_modules())
    for names in groups:
        parent = parents[names[0].rpartition(".")[0]]
        joint, product, start = _joint([parents[name] for name in names]), _Product(), 0
        for name in names:
            stop = start + parents[name].out_features
            sibling = SiblingLinear(joint, product, slice(start, stop), name == names[0], name == names[-1])
            setattr(parent, name.rpartition(".")[2], sibling)
            parents[name] = sibling  # Lets go of the separate weight before the next is made.
            start = stop
    return sum(len(names) - 1 for names in groups)


def _siblings(model: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Names of the children of one module that were each called once, one after another, on one tensor."""
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
        if groups and _joins(groups[-1][-1], call):
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


def _joins(before: tuple[str, nn.Linear, Tensor], call: tuple[str, nn.Linear, Tensor]) -> bool:
    (name, module, x), (other_name, other, other_x) = before, call
    return (
        x is other_x
        and name.rpartition(".")[0] == other_name.rpartition(".")[0]
        and module is not other
        and module.weight.dtype == other.weight.dtype
        and (module.bias is None) == (other.bias is None)
    )


@torch.no_grad()
def _joint(linears: list[nn.Linear]) -> nn.Linear:
    """Made on the meta device first, so that nothing is initialized only to be overwritten."""
    first = linears[0]
    joint = nn.Linear(
        first.in_features,
        sum(linear.out_features for linear in linears),
        bias=first.bias is not None,
        device="meta",
    )
    joint.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if first.bias is not None:
        joint.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joint
