"""Compiles the layers of a transformers model one by one; layers that are alike share a compilation.

A graph of the whole model would take five times as long to compile. Guards are dropped, since a model in an
engine never changes; instead, layers are compared here by everything that compiled code depends on.

Compiled code takes any number of tokens, but its tile sizes and threads are tuned for the number of tokens in
the trace. Hence there are two compilations: one for decoding, one for prefill.
"""

import dataclasses
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from ....base.batch_invariance import TUNED, BatchInvariance
from ....base.errors import UserError
from ....base.log import logger
from ....kernels import inductor_pdl
from . import graph_passes
from .cross_layer_fusion import UNFUSED, Carry, Chain, Rounded, undo_fusion
from .inplace_barriers import barriers_in_loops


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The number of tokens for which layers are compiled, and compiler options."""

    from_tokens: int
    """The least number of tokens in a step; smaller steps use the previous tuning."""
    traced_tokens: int
    """Number of tokens in the traced pass: a size that no other dimension has, so that it is recognized."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Compiler options. They must differ between tunings, since the compiler's cache ignores traced sizes."""
    pdl: bool = False
    """Whether kernels use programmatic dependent launch: they start while those ahead of them still run."""


ONE_FORM = {"triton.persistent_reductions": False}
"""Norms of heads as loops, for which the compiler has only one form. Of persistent kernels it times several,
and with so few tokens a different one would win in every process."""
TUNINGS = (Tuning(0, 37, ONE_FORM, pdl=True), Tuning(129, 2053, {"max_autotune_pointwise": True}))
"""All tunings, by ascending `from_tokens`."""
ONE_TUNING = TUNINGS[:1]
"""For batch invariance: two compilations would sum norms in two orders, and differ in what they fuse.

The compiler still chooses by timing how sums are split, once in a process. Its `deterministic` mode guesses
instead; decoding for 32 requests then took 1.6 times as long on an H200.
"""

TELLS_NOTHING = {"layer_idx", "training"}
"""Attributes that may differ between layers without changing what they compute."""


FUSION = {"combo_kernels": True, "combo_kernel_foreach_dynamic_shapes": True}
"""Fuses the same operations on queries and on keys into one kernel."""


class CompiledLayers:
    """A context in which one forward pass is run; every layer that is called in it is compiled.

    The first tuning compiles all layers that can be compiled; later ones compile the same layers again.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain = UNFUSED,
        tuning: Tuning = TUNINGS[0],
        batch_invariance: BatchInvariance = "tuned",
    ):
        """batch_invariance: in modes other than `tuned`, a layer that cannot be compiled is a UserError."""
        self.batch_invariance = batch_invariance
        self.chain = chain
        self.tuning = tuning
        self.carry = Carry()
        layers = [*model_layers(model), *chain.first_norms()]
        if tuning is not TUNINGS[0]:
            layers = [layer for layer in layers if isinstance(layer.forward, _CompiledForward)]
        self._traced = [_TracedLayer(self, layer) for layer in layers]
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._failed: set[Hashable] = set()

    def __enter__(self) -> Self:
        for traced in self._traced:
            traced.layer.forward = traced
        return self

    def __exit__(self, *error: object) -> None:
        for traced in self._traced:
            plain, compiled = traced.plain, traced.compiled
            if compiled is None:
                traced.layer.forward = plain
            elif isinstance(plain, _CompiledForward):
                traced.layer.forward = _ForwardByTokens(plain, compiled, self.tuning.from_tokens)
            else:
                traced.layer.forward = compiled

    def compiled(self, layer: nn.Module, args: tuple, kwargs: dict) -> "_CompiledForward | None":
        """Return the layer's forward, compiled for arguments like these and shared by layers that are alike.

        The result is None if compiling a layer of the same kind has failed before.
        """
        following = self.chain.next_norm(layer)
        kind = (_signature(layer), _signature(following), _signature(args), _signature(kwargs))
        if kind in self._failed:
            return None
        if kind not in self._compiled:
            pdl_options = inductor_pdl.options() if self.tuning.pdl else {}
            self._compiled[kind] = torch.compile(
                _own_code(cast(types.FunctionType, _run)),
                fullgraph=True,
                dynamic=False,
                options={
                    "guard_filter_fn": _no_guards,
                    **FUSION,
                    **graph_passes.options(self.batch_invariance),
                    **pdl_options,
                    **self.tuning.options,
                },
            )
        norm = self.chain.input_norms.get(layer)
        rounds = self.chain.rounds and self.batch_invariance == TUNED
        return _CompiledForward(kind, self._compiled[kind], layer, norm, following, rounds, self.carry)

    def failed(self, forward: "_CompiledForward", error: Exception) -> None:
        self._failed.add(forward.kind)
        reason = str(error).strip().splitlines()[0]
        name = type(forward.layer).__name__
        if self.batch_invariance != "tuned":
            raise UserError(
                f"{name} cannot be compiled, so its bits would depend on the batch: {reason}. "
                "Leave --batch-invariance out"
            ) from error
        logger.warning(f"{name} is served uncompiled, and slower for it: {reason}")


class _CompiledForward:
    """Replaces a layer's forward once it is compiled."""

    def __init__(
        self,
        kind: Hashable,
        run: Callable[..., Any],
        layer: nn.Module,
        norm: str | None,
        following: nn.Module | None,
        rounds: bool,
        carry: Carry,
    ):
        self.kind = kind
        self.run = run
        self.layer = layer
        self.norm = norm
        self.following = following
        self.rounds = rounds
        self.carry = carry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply(self.normed(args), args, kwargs)

    def normed(self, args: tuple) -> Tensor | Rounded | None:
        """Return what the layer's input norm makes of its input, which the layer before has if there is one;
        None if the layer computes it.
        """
        if self.norm is None:
            return None
        normed = self.carry.take(args[0])
        if self.norm and normed is None:
            normed = getattr(self.layer, self.norm).module(args[0])
            return _with_rounding(normed) if self.rounds else normed
        return normed

    def apply(self, normed: Tensor | Rounded | None, args: tuple, kwargs: dict) -> Any:
        if self.norm == "" and normed is not None:  # The layer is a norm itself.
            return normed[0] if isinstance(normed, tuple) else normed
        output, following_normed = self.run(
            self.layer, self.norm, self.following, self.rounds, normed, args, kwargs
        )
        if self.following is not None:
            self.carry.output, self.carry.normed = output, following_normed
        return output


class _ForwardByTokens:
    """Replaces a layer's forward that is compiled twice, for few tokens and for many."""

    def __init__(self, few: Callable[..., Any], many: Callable[..., Any], many_from: int):
        self.few = few
        self.many = many
        self.many_from = many_from

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = next(_tensors((args, kwargs)), None)
        tokens = 0 if first is None else first.shape[:2].numel()
        return (self.few if tokens < self.many_from else self.many)(*args, **kwargs)


def restore_layers(model: nn.Module) -> None:
    """Undo the compilation and fusion by an engine that used the model before."""
    layers = model_layers(model)
    undo_fusion(layers)
    for module in [*layers, *(child for layer in layers for child in layer.children())]:
        if isinstance(module.forward, _CompiledForward | _ForwardByTokens):
            del module.forward


class _TracedLayer:
    """Replaces a layer's forward in the traced pass."""

    def __init__(self, compiled_layers: CompiledLayers, layer: nn.Module):
        self.compiled_layers = compiled_layers
        self.layer = layer
        self.plain = layer.forward
        self.compiled: _CompiledForward | None = None
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            # Called again, perhaps with another name as argument, which compiled code takes for a constant.
            self.compiled = None
            return self.plain(*args, **kwargs)
        self.layer.forward = self.plain
        forward = self.compiled_layers.compiled(self.layer, args, kwargs)
        traced_tokens = self.compiled_layers.tuning.traced_tokens
        try:
            if forward is None:
                return self.plain(*args, **kwargs)
            normed = forward.normed(args)
            _mark_token_dims((normed, args, kwargs), traced_tokens)
            with inductor_pdl.waiting_first(), barriers_in_loops():
                output = forward.apply(normed, args, kwargs)
            _mark_token_dims((output, self.compiled_layers.carry.normed), traced_tokens)
            self.compiled = forward
            return output
        except torch._dynamo.exc.TorchDynamoException as error:
            if forward is not None:
                self.compiled_layers.failed(forward, error)
            return self.plain(*args, **kwargs)
        finally:
            self.layer.forward = self


def _run(
    layer: nn.Module,
    norm: str | None,
    following: nn.Module | None,
    rounds: bool,
    normed: Tensor | Rounded | None,
    args: tuple,
    kwargs: dict,
) -> Any:
    """Return the layer's output, and that output after `following`, which is the next layer's input norm.

    rounds: whether to return the latter with its rounding
    """
    if norm and normed is not None:
        getattr(layer, norm).precomputed.value = normed
    output = type(layer).forward(layer, *args, **kwargs)
    if following is None:
        return output, None
    following_normed = type(following).forward(following, output)
    return output, _with_rounding(following_normed) if rounds else following_normed


def _with_rounding(normed: Tensor) -> Rounded:
    return normed, *torch.ops.scalegate.round_rows(normed)


def _mark_token_dims(value: Any, traced_tokens: int) -> None:
    """Mark dimensions of tokens as dynamic, so that compiled code takes any number of tokens."""
    for tensor in _tensors(value):
        for dim, size in enumerate(tensor.shape):
            if size == traced_tokens:
                torch._dynamo.mark_dynamic(tensor, dim)


def _own_code(function: types.FunctionType) -> types.FunctionType:
    """Return a copy with its own code object, under which compiled code is stored."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _no_guards(entries: list[Any]) -> list[bool]:
    return [False] * len(entries)


def model_layers(model: nn.Module) -> list[nn.Module]:
    """Yield the members of the model's outermost module lists, and the modules beside such a list."""
    for parent in model.modules():
        children = list(parent.children())
        lists = [child for child in children if isinstance(child, nn.ModuleList)]
        if lists:
            beside = [child for child in children if not isinstance(child, nn.ModuleList)]
            return [layer for layer_list in lists for layer in layer_list] + beside
    return []


def _signature(value: Any) -> Hashable:
    """Return the properties that compiled code depends on. Equal signatures share code; sizes of arguments do
    not count."""
    if isinstance(value, Tensor):
        return value.ndim, value.dtype
    if isinstance(value, nn.Module):
        own = {
            name: item
            for name, item in vars(value).items()
            if (name[0] != "_" or name == "_packed")
            and not isinstance(item, _TracedLayer | _CompiledForward | _ForwardByTokens)
        }
        tensors = {**value._parameters, **value._buffers}
        shapes = [
            (name, t if t is None else (tuple(t.shape), t.stride(), t.dtype)) for name, t in tensors.items()
        ]
        return type(value), _signature(own), _signature(shapes), _signature(value._modules)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), _signature(vars(value))
    if isinstance(value, Mapping):
        return tuple((name, _signature(item)) for name, item in value.items() if name not in TELLS_NOTHING)
    if isinstance(value, list | tuple):
        return tuple(_signature(item) for item in value)
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, int | float | str | torch.dtype | type(None)):
        return value
    return hash(type(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
