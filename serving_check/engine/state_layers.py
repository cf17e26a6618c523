"""Layers with a state, such as linear attention and Mamba, over slots of our own.

transformers' modules ask a cache for their state, and pass it to a function that computes one more token. The
function for one more token is the seam: a module's own forward runs as if every token were the next one of
some request, but it calls our functions instead of transformers', and ours know which token belongs to which
request. The arithmetic is in `layouts/states/`.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ...layouts.kv.attention_metadata import AttentionMetadata
from ...layouts.states.all_states import STATE_FORMATS
from ...layouts.states.gated_delta_rule import DeltaInputs
from ...layouts.states.mamba1 import Mamba1Inputs
from ...layouts.states.mamba2 import Mamba2Inputs
from ...layouts.states.short_convolution import ConvolutionInputs
from ...layouts.states.state_format import StateInputs, StateKey, StateShape, StateSlots
from .state_modules import forward_of
from .unsupported import unsupported

CACHES = ("cache", "cache_params", "past_key_values")
"""The names that transformers gives the cache among the arguments of a forward."""
ASKS_FOR_STATES = {"get_conv_state", "get_recurrent_state", "get_linear_cache"}
"""A cache's methods from transformers 5.21 on."""
READS_STATES = {"conv_states", "recurrent_states"}
"""What transformers before 5.21 reads from the layers of a cache."""


STATE_LAYER = "state_layer_index"
"""Name of a buffer of each module with states: its layer's index, int64 [] in host memory."""


class States(Protocol):
    """Takes the state calls of a forward pass."""

    def compute(self, module: nn.Module, key: StateKey, inputs: StateInputs, like: Tensor) -> Tensor:
        """Return outputs [T, ...] of a step's T tokens.

        module: the one that keeps the state. like: a tensor [T, ...] with the outputs' dtype
        """


_STATES: ContextVar[States] = ContextVar("the states of the step that a forward pass is computing")


@contextmanager
def taking_states(states: States) -> Iterator[None]:
    """Let layers with a state call `states` inside the `with` block."""
    token = _STATES.set(states)
    try:
        yield
    finally:
        _STATES.reset(token)


class StepStates:
    """The states of one step: its metadata, and the slots of every layer."""

    def __init__(self, slots: Mapping[StateKey, StateSlots], metadata: AttentionMetadata):
        self.slots, self.metadata = slots, metadata

    def compute(self, module: nn.Module, key: StateKey, inputs: StateInputs, like: Tensor) -> Tensor:
        return self.by_key(key, inputs, like)

    def by_key(self, key: StateKey, inputs: StateInputs, like: Tensor) -> Tensor:
        """Return what `compute` returns."""
        return self.slots[key].forward(inputs, like, self.metadata)


class StatesAsOp:
    """Passes state calls to a custom op (`step_ops.py`)."""

    def compute(self, module: nn.Module, key: StateKey, inputs: StateInputs, like: Tensor) -> Tensor:
        tensors, numbers = inputs.tensors_and_numbers()
        layer_index = getattr(module, STATE_LAYER)
        return torch.ops.scalegate.layer_state(layer_index, key.name, key.index, tensors, numbers, like)


STATES_AS_OP = StatesAsOp()


def _states() -> States | None:
    """Return what takes the calls. Compiled layers run with ops only, and cannot read context variables."""
    return STATES_AS_OP if torch.compiler.is_compiling() else _STATES.get(None)


class StateObserver:
    """Records the shape of every state; outputs are computed as if each token were the first of a request."""

    def __init__(self) -> None:
        self.shapes: dict[StateKey, StateShape] = {}

    def compute(self, module: nn.Module, key: StateKey, inputs: StateInputs, like: Tensor) -> Tensor:
        if key in self.shapes:
            raise unsupported("this model", f"layer {key.layer} computes its state more than once")
        state_format = STATE_FORMATS[key.name]
        shape = self.shapes[key] = state_format.shape(inputs)
        states = torch.zeros((len(like), *shape.dims), dtype=shape.dtype, device=like.device)
        return state_format.step(inputs, states)


class _State:
    """Stands for a layer's state where transformers passes it on; any other use of it is refused."""

    def __init__(self, module: nn.Module, layer: int, index: int):
        self.module, self.layer, self.index = module, layer, index

    def compute(self, name: str, inputs: StateInputs, like: Tensor) -> Tensor:
        states = _states()
        assert states is not None
        return states.compute(self.module, StateKey(self.layer, name, self.index), inputs, like)

    def to(self, *_: Any, **__: Any) -> "_State":
        return self

    def __getitem__(self, at: Any) -> "_State":
        """Zamba computes head by head: state[:, head] is the state of one head."""
        if not (isinstance(at, tuple) and at[0] == slice(None) and isinstance(at[1], int)):
            raise unsupported("this model", f"a layer takes {at} of its state, which is unknown here")
        return _State(self.module, self.layer, at[1])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise unsupported(
            "this model",
            f"a layer uses its state in {getattr(func, '__name__', func)}, which is unknown here",
        )


class _Cache:
    """The object that is passed to a module as its cache."""

    def __init__(self, module: nn.Module):
        self._module = module

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> _State:
        return _State(self._module, layer_idx, state_idx)

    get_recurrent_state = get_conv_state

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_recurrent_state(self, *_: Any, **__: Any) -> None:
        """Do nothing: the slots have changed already."""

    # Before transformers 5.21:

    @property
    def layers(self) -> "_CacheLayers":
        return _CacheLayers(self._module)

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return True


class _CacheLayers:
    """The layers of a cache by their index."""

    def __init__(self, module: nn.Module):
        self._module = module

    def __getitem__(self, layer_idx: int) -> "_CacheLayer":
        return _CacheLayer(self._module, layer_idx)


class _CacheLayer:
    record_past = False

    def __init__(self, module: nn.Module, layer_idx: int):
        self.conv_states = self.recurrent_states = (_State(module, layer_idx, 0),)


def _convolution(state: _State, given: Mapping[str, Any]) -> Tensor:
    x = given["hidden_states"][:, :, 0]
    output = state.compute("short_convolution", ConvolutionInputs(x, given["weight"], given.get("bias")), x)
    activation = given.get("activation")
    return (output if activation is None else ACT2FN[activation](output))[:, :, None]


def _delta_rule(state: _State, given: Mapping[str, Any]) -> tuple[Tensor, _State]:
    if not given.get("use_qk_l2norm_in_kernel"):
        raise unsupported("this model", "its gated delta rule does not normalize queries and keys")
    names = ("query", "key", "value", "g", "beta")
    inputs = DeltaInputs(*(given[name][:, 0] for name in names))
    return state.compute("gated_delta_rule", inputs, inputs.value)[:, None], state


def _mamba2(state: _State, given: Mapping[str, Any]) -> Tensor:
    x, a, d = given["hidden_states"], given["A"], given.get("D")
    step = _step_size(given["dt"][..., 0], given, lambda bias: bias[:, 0])
    # Prompts are scanned with these limits, so all tokens are: one that is computed again stays what it was.
    low, high = getattr(state.module, "time_step_limit", (0.0, float("inf")))
    inputs = Mamba2Inputs(
        x, step.clamp(low, high), given["B"], given["C"], a[:, 0, 0], None if d is None else d[:, 0]
    )
    return _gated(state.compute("mamba2", inputs, x), given)


def _mamba1(state: _State, given: Mapping[str, Any]) -> Tensor:
    x = given["hidden_states"]
    step = _step_size(given["dt"], given, lambda bias: bias)
    inputs = Mamba1Inputs(x, step, given["B"], given["C"], given["A"], given.get("D"))
    return _gated(state.compute("mamba1", inputs, x), given)


def _step_size(dt: Tensor, given: Mapping[str, Any], bias_of: Callable[[Tensor], Tensor]) -> Tensor:
    if given.get("dt_bias") is not None:
        dt = dt + bias_of(given["dt_bias"]).to(dt.dtype)
    return functional.softplus(dt) if given.get("dt_softplus") else dt


def _gated(output: Tensor, given: Mapping[str, Any]) -> Tensor:
    gate = given.get("z")
    return output if gate is None else output * functional.silu(gate)


FUNCTIONS: dict[str, tuple[str, Callable[[_State, Mapping[str, Any]], Any]]] = {
    "causal_conv1d_update": ("conv_state", _convolution),
    "torch_recurrent_gated_delta_rule": ("initial_state", _delta_rule),
    "recurrent_kimi_delta_attention": ("initial_state", _delta_rule),
    "mamba2_selective_state_update": ("state", _mamba2),
    "mamba_selective_state_update": ("state", _mamba1),
}
"""transformers' functions that compute one token: the argument that holds the state, and our replacement."""


def keeps_a_state(module: nn.Module) -> bool:
    """Say whether the module asks a cache for a state, or keeps one in a way that is supported here."""
    names = set(_names(module))
    reads = names & READS_STATES and "has_previous_state" in names
    return bool(names & ASKS_FOR_STATES or reads) or forward_of(module) is not None


def hook_state_layers(model: PreTrainedModel, architecture: str) -> None:
    """Make a model's layers with states use our states inside an engine. Raise UserError if a layer keeps a
    state of an unknown kind.
    """
    for name, module in model.named_modules():
        if keeps_a_state(module) and "forward" not in module.__dict__:
            if not hasattr(module, "layer_idx"):
                module.layer_idx = next(int(part) for part in name.split(".") if part.isdecimal())  # type: ignore[assignment]
            index = torch.tensor(module.layer_idx, device="cpu")
            module.register_buffer(STATE_LAYER, index, persistent=False)
            module.forward = MethodType(_hooked_forward(module, architecture), module)  # type: ignore[method-assign]


def _names(module: nn.Module) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _hooked_forward(module: nn.Module, architecture: str) -> Callable[..., Any]:
    plain = type(module).forward
    signature = inspect.signature(inspect.unwrap(plain))
    compute = _compute_anew(module) or _compute_by_functions(module, architecture, signature)
    hidden_name, *others = [
        name for name, parameter in signature.parameters.items() if parameter.kind != parameter.VAR_KEYWORD
    ][1:]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _states() is None:
            return plain(self, *args, **kwargs)
        given = dict(zip((hidden_name, *others), args, strict=False)) | kwargs
        known = {name: given[name] for name in others if name in given and name != "attention_mask"}
        hidden = given[hidden_name]
        if hidden.shape[0] != 1:
            return compute(self, hidden, known)
        output = compute(self, hidden.transpose(0, 1), known)
        return _in_a_row(output) if isinstance(output, Tensor) else tuple(map(_in_a_row, output))

    return forward


def _in_a_row(output: Tensor | None) -> Tensor | None:
    """Transpose [T, 1, ...] to [1, T, ...]."""
    return None if output is None else output.transpose(0, 1)


def _compute_anew(module: nn.Module) -> Callable[[Any, Tensor, dict[str, Any]], Any] | None:
    """Return the forward that replaces the module's own, over our states."""
    own = forward_of(module)
    if own is None:
        return None

    def compute(self: Any, hidden: Tensor, given: dict[str, Any]) -> Any:
        def with_state(name: str, inputs: StateInputs, like: Tensor, index: int = 0) -> Tensor:
            return _State(self, self.layer_idx, index).compute(name, inputs, like)

        return own(self, hidden, given, with_state)

    return compute


def _compute_by_functions(
    module: nn.Module, architecture: str, signature: inspect.Signature
) -> Callable[[Any, Tensor, dict[str, Any]], Any]:
    """Return the module's own forward, with our functions in place of those in FUNCTIONS."""
    written = inspect.unwrap(type(module).forward)
    ours = {
        name: _with_our_state(written.__globals__[name], *FUNCTIONS[name])
        for name in _names(module)
        if name in FUNCTIONS
    }
    cache = next((name for name in CACHES if name in signature.parameters), None)
    if not ours or cache is None:
        raise unsupported(architecture, f"{type(module).__name__} keeps a state of an unknown kind")
    # Without a module's name, or the compiler would look names up in that module, not here.
    names = {name: value for name, value in written.__globals__.items() if name != "__name__"}
    hooked = FunctionType(
        written.__code__,
        names | ours,
        written.__name__,
        written.__defaults__,
        written.__closure__,
    )
    hooked.__kwdefaults__ = written.__kwdefaults__

    def compute(self: nn.Module, hidden: Tensor, given: dict[str, Any]) -> Any:
        return hooked(self, hidden, **given | {cache: _Cache(self)})

    return compute


def _with_our_state(
    theirs: Callable[..., Any], state_name: str, ours: Callable[..., Any]
) -> Callable[..., Any]:
    names = tuple(inspect.signature(theirs).parameters)

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return ours(given[state_name], given)

    return call
