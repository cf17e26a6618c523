"""A layer's first step, as a rule a norm, computed at the end of the layer before it.

What ends a layer is an addition to the residual, and what begins the next is a norm of that sum: in one piece
of compiled code they are one kernel. Which module opens a layer is found by running the model, not by its
name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ...layouts.linear import QuantizedLinear


@dataclass
class _Slot:
    value: Tensor | None = None


class PrecomputedNorm(nn.Module):
    """Stands where a layer's opening module stood: gives what was computed ahead, if it was."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.ahead = _Slot()

    def forward(self, x: Tensor) -> Tensor:
        if self.ahead.value is None:
            return self.module(x)
        opened, self.ahead.value = self.ahead.value, None
        return opened


@dataclass
class Carry:
    """A layer's output on its way to the next layer, with what that layer's opening makes of it."""

    output: Tensor | None = None
    opened: Tensor | None = None

    def take(self, x: Tensor) -> Tensor | None:
        """What was computed ahead for `x`; None where the model passes on something else."""
        opened = self.opened if self.output is x else None
        self.output = self.opened = None
        return opened


@dataclass
class _Call:
    """One layer's call in the observed pass."""

    layer: nn.Module
    input: Any
    output: Any = None
    first: tuple[str, Any, Any] | None = None
    """Name, input and output of the child that was called first."""
    children: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Chain:
    """Layers that hand their output to one another as it is."""

    openings: Mapping[nn.Module, str]
    """By layer, the name of its opening; empty for one that is nothing else, as a last norm is."""
    successors: Mapping[nn.Module, nn.Module]
    """By layer, the one that takes its output."""

    def opening(self, layer: nn.Module) -> nn.Module:
        """The module itself, which the layer's `PrecomputedNorm` stands for."""
        name = self.openings[layer]
        return getattr(layer, name).module if name else layer

    def next_norm(self, layer: nn.Module) -> nn.Module | None:
        """The opening of the layer that follows, None where none does."""
        return self.opening(self.successors[layer]) if layer in self.successors else None

    def first_norms(self) -> list[nn.Module]:
        """Those that no layer precedes: they are computed on their own."""
        later = set(self.successors.values())
        return [self.opening(layer) for layer in self.openings if layer not in later]


UNFUSED = Chain({}, {})
"""Every layer by itself."""


def fuse_across_layers(layers: Sequence[nn.Module], run: Callable[[], object]) -> Chain:
    """Watch `run`, and make it possible to give each layer what its opening computes."""
    calls = _observe(layers, run)
    once = [call for call in calls if sum(other.layer is call.layer for other in calls) == 1]
    openings: dict[nn.Module, str] = {}
    successors: dict[nn.Module, nn.Module] = {}
    for before, call in pairwise(once):
        name = _opening(call)
        if name is not None and isinstance(call.input, Tensor) and call.input is before.output:
            successors[before.layer] = call.layer
            openings[call.layer] = name
            first = _opening(before)
            if first:
                openings.setdefault(before.layer, first)
    for layer, name in openings.items():
        if name:
            setattr(layer, name, PrecomputedNorm(getattr(layer, name)))
    return Chain(openings, successors)


def close(layers: Sequence[nn.Module]) -> None:
    """Undo `fuse_across_layers`."""
    for layer in layers:
        for name, child in list(layer.named_children()):
            if isinstance(child, PrecomputedNorm):
                setattr(layer, name, child.module)


def _opening(call: _Call) -> str | None:
    """The name of the child that opens the layer; empty where the layer has no children; None for none."""
    if not any(True for _ in call.layer.children()):
        return "" if isinstance(call.output, Tensor) else None
    if call.first is None:
        return None
    name, x, output = call.first
    module = getattr(call.layer, name)
    opens = x is call.input and isinstance(output, Tensor) and call.children.count(name) == 1
    is_small = not any(isinstance(part, nn.Linear | QuantizedLinear) for part in module.modules())
    is_watched = module._forward_hooks or module._forward_pre_hooks
    return name if opens and is_small and not is_watched else None


def _observe(layers: Sequence[nn.Module], run: Callable[[], object]) -> list[_Call]:
    calls: list[_Call] = []

    def layer_begins(layer: nn.Module, args: tuple) -> None:
        calls.append(_Call(layer, args[0] if args else None))

    def layer_ends(layer: nn.Module, args: tuple, output: Any) -> None:
        calls[-1].output = output

    def child_ends(name: str, args: tuple, output: Any) -> None:
        call = calls[-1]
        call.children.append(name)
        if call.first is None:
            call.first = (name, args[0] if args else None, output)

    hooks = []
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(layer_begins))
        hooks.append(layer.register_forward_hook(layer_ends))
        for name, child in layer.named_children():
            hooks.append(
                child.register_forward_hook(lambda _, args, out, name=name: child_ends(name, args, out))
            )
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls
