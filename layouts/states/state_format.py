"""What a state format is: how a layer computes its output and its state of a request, by token and by chunk.

A state is kept by recurrent layers instead of keys and values; its size does not grow with the context. Every
running request has one slot in each recurrent layer, at the request's row. `all_states.py` registers the
particular formats.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateShape:
    """One layer's state of one request."""

    dims: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_request(self) -> int:
        return math.prod(self.dims) * self.dtype.itemsize


@dataclass(frozen=True)
class StateInputs:
    """The base of a format's inputs: tensors of a token each, [T, ...], and parameters of the layer."""

    @classmethod
    def parameters(cls) -> frozenset[str]:
        """Return the names of the fields that belong to the layer, not to tokens."""
        return frozenset()

    def part(self, tokens: slice) -> Self:
        """Return the inputs of some of the tokens."""
        cut = {
            field.name: getattr(self, field.name)[tokens]
            for field in fields(self)
            if field.name not in self.parameters() and getattr(self, field.name) is not None
        }
        return replace(self, **cut)


Inputs = TypeVar("Inputs", bound=StateInputs, contravariant=True)


class StateFormat(Protocol[Inputs]):
    """How a kind of layer computes its output and its next state. This class is the reference, in plain
    torch.
    """

    def shape(self, inputs: Inputs) -> StateShape:
        """Return the shape of a request's state in a layer that has the given inputs."""

    def step(self, inputs: Inputs, states: Tensor) -> Tensor:
        """Compute one token for each of B requests: outputs [B, ...]. The `states` [B, *dims] change in
        place.

        This defines the format. The state before the first token is zeros.
        """

    def scan(self, inputs: Inputs, state: Tensor) -> Tensor:
        """Compute T consecutive tokens of one request: outputs [T, ...]. The `state` [*dims] changes in
        place.

        The result equals T calls of `step` up to rounding, wherever a prompt is cut.
        """


Scanned = TypeVar("Scanned", bound=StateInputs)


def scan_by_steps(state_format: StateFormat[Scanned], inputs: Scanned, tokens: int, state: Tensor) -> Tensor:
    """Scan one token at a time, for formats that have no faster scan."""
    steps = [state_format.step(inputs.part(slice(at, at + 1)), state[None]) for at in range(tokens)]
    return torch.cat(steps)


@dataclass(frozen=True)
class StateKey:
    """The key of one of a model's states."""

    layer: int
    name: str
    """The name of the state format."""
    index: int = 0
    """Tells apart the states of a layer that has several of one format."""
