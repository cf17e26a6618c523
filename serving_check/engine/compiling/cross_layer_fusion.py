"""Cross-layer fusion: the residual add that ends a layer with the norm that begins the next.

Each layer is compiled together with its successor's input norm, so that add and norm become one kernel. A
layer's input norm is the first module that it calls on its input. The input norm is found by running the
model, not by its name, and may be any small module. If products in FP8 take a norm's result, it is passed on
with its rounding to E4M3, which `rounding_pass.py` puts into the norm's kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from torch import Tensor, nn

from ....layouts.modules.linear import QuantizedLinear
from ....layouts.modules.rounded_inputs import also_rounded, linear_takes_rounded

Rounded = tuple[Tensor, Tensor, Tensor]
"""A norm's result [..., K], and its rounding: codes [M, K] and scales [1, M]."""


@dataclass
class _Slot:
    value: Tensor | Rounded | None = None


class PrecomputedNorm(nn.Module):
    """Replaces a layer's input norm: returns the previous layer's precomputed result, if there is one."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.precomputed = _Slot()

    @property
    def weight(self) -> Tensor:
        """Mamba's layers ask for its dtype."""
        return cast(Tensor, self.module.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.precomputed.value is None:
            return self.module(x)
        normed, self.precomputed.value = self.precomputed.value, None
        if isinstance(normed, tuple):
            normed = also_rounded(*normed)
        return normed.to(x.dtype)  # Mamba's residuals may be float32


@dataclass
class Carry:
    """A layer's output, and the same output after the next layer's input norm."""

    output: Tensor | None = None
    normed: Tensor | Rounded | None = None

    def take(self, x: Tensor) -> Tensor | Rounded | None:
        """Return the precomputed norm of `x`; None if the model passes on another tensor than the layer's
        output.
        """
        normed = self.normed if self.output is x else None
        self.output = self.normed = None
        return normed


@dataclass
class _Call:
    """One layer's call in the observed pass."""

    layer: nn.Module
    input: Any
    output: Any = None
    first: tuple[str, Any, Any] | None = None
    """The name, input and output of the child that the layer called first."""
    children: list[str] = field(default_factory=list)
    rounded: list[Any] = field(default_factory=list)
    """Inputs of products that take them rounded by another kernel."""


@dataclass(frozen=True)
class Chain:
    """Layers whose output is directly the next layer's input."""

    input_norms: Mapping[nn.Module, str]
    """The name of each layer's input norm; empty if the layer itself is a norm, such as the model's final
    norm."""
    successors: Mapping[nn.Module, nn.Module]
    """For each layer, the layer that takes its output."""
    rounds: bool = False
    """Whether products take the result of an input norm rounded by its kernel."""

    def input_norm(self, layer: nn.Module) -> nn.Module:
        """Return the module itself, which the layer's `PrecomputedNorm` replaces."""
        name = self.input_norms[layer]
        return getattr(layer, name).module if name else layer

    def next_norm(self, layer: nn.Module) -> nn.Module | None:
        """Return the input norm of the next layer; None if no layer follows."""
        return self.input_norm(self.successors[layer]) if layer in self.successors else None

    def first_norms(self) -> list[nn.Module]:
        """Input norms of layers without a predecessor, which are computed by themselves."""
        later = set(self.successors.values())
        return [self.input_norm(layer) for layer in self.input_norms if layer not in later]


UNFUSED = Chain({}, {})
"""No fusion."""


def fuse_across_layers(layers: Sequence[nn.Module], run: Callable[[], object]) -> Chain:
    """Observe in `run` which layers feed which, and replace their input norms by `PrecomputedNorm`s."""
    calls = _observe(layers, run)
    once = [call for call in calls if sum(other.layer is call.layer for other in calls) == 1]
    input_norms: dict[nn.Module, str] = {}
    successors: dict[nn.Module, nn.Module] = {}
    for before, call in pairwise(once):
        name = _input_norm(call)
        if name is not None and isinstance(call.input, Tensor) and call.input is before.output:
            successors[before.layer] = call.layer
            input_norms[call.layer] = name
            first = _input_norm(before)
            if first:
                input_norms.setdefault(before.layer, first)
    for layer, name in input_norms.items():
        if name:
            setattr(layer, name, PrecomputedNorm(getattr(layer, name)))
    return Chain(input_norms, successors, any(map(_rounds_norm, once)))


def undo_fusion(layers: Sequence[nn.Module]) -> None:
    """Undo `fuse_across_layers`."""
    for layer in layers:
        for name, child in list(layer.named_children()):
            if isinstance(child, PrecomputedNorm):
                setattr(layer, name, child.module)


def _input_norm(call: _Call) -> str | None:
    """Return the name of the first child that takes the layer's input, or None; empty if the layer has no
    children.
    """
    if not any(True for _ in call.layer.children()):
        return "" if isinstance(call.output, Tensor) else None
    if call.first is None:
        return None
    name, x, output = call.first
    module = getattr(call.layer, name)
    is_first = x is call.input and isinstance(output, Tensor) and call.children.count(name) == 1
    is_small = not any(isinstance(part, nn.Linear | QuantizedLinear) for part in module.modules())
    is_watched = module._forward_hooks or module._forward_pre_hooks
    return name if is_first and is_small and not is_watched else None


def _rounds_norm(call: _Call) -> bool:
    """Say whether a product takes the result of the layer's input norm as it is, and rounds it."""
    if not _input_norm(call) or call.first is None:
        return False
    return any(x is call.first[2] for x in call.rounded)


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

    def product_begins(args: tuple) -> None:
        if calls:
            calls[-1].rounded.append(args[0])

    hooks = []
    for layer in layers:
        hooks += [
            product.register_forward_pre_hook(lambda _, args: product_begins(args))
            for product in layer.modules()
            if isinstance(product, QuantizedLinear) and linear_takes_rounded(product)
        ]
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
