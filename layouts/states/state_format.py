"""What a state format is: how a layer computes its output and its state of a request, by token and by chunk.

A state is kept by recurrent layers instead of keys and values; its size does not grow with the context. Every
running request has one slot in each recurrent layer, at the request's row. `all_states.py` registers the
particular formats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from ...kernels.states.batch import StateBatch
from ..kv.attention_metadata import AttentionMetadata


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

    def tensors_and_numbers(self) -> tuple[list[Tensor | None], list[int]]:
        """Return the fields as a custom op takes them: tensors or None, then whole numbers."""
        values = [getattr(self, field.name) for field in fields(self)]
        return (
            [value for value in values if not isinstance(value, int)],
            [value for value in values if isinstance(value, int)],
        )

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> Self:
        """Undo `tensors_and_numbers`; fields that are numbers come last."""
        return cls(*tensors, *numbers)


Inputs = TypeVar("Inputs", bound=StateInputs)


class StateFormat(Protocol[Inputs]):
    """How a kind of layer computes its output and its next state. `step` and `scan` are the reference, in
    plain torch.
    """

    inputs: type[Inputs]

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

    def run_kernels(self, inputs: Inputs, slots: Tensor, batch: StateBatch, output: Tensor) -> None:
        """Compute a step's T tokens on a GPU.

        slots: [max_requests, *dims], which change in place. output: [T, ...], which is written for every
        token of a request, and for padding if all requests decode
        """


Scanned = TypeVar("Scanned", bound=StateInputs)


def scan_by_steps(state_format: StateFormat[Scanned], inputs: Scanned, tokens: int, state: Tensor) -> Tensor:
    """Scan one token at a time, for formats that have no faster scan."""
    steps = [state_format.step(inputs.part(slice(at, at + 1)), state[None]) for at in range(tokens)]
    return torch.cat(steps)


class StateSlots(Protocol):
    """One layer's states: a slot for each running request, at the request's row.

    A request that begins, or begins again after a preemption, starts from a state of zeros, whatever the
    request before it has left in the slot.
    """

    def forward(self, inputs: StateInputs, like: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return outputs [T, ...] of a step's T tokens, with zeros for padding. The slots change in place.

        like: a tensor with the outputs' shape and dtype
        """


@dataclass(frozen=True)
class StateKey:
    """The key of one of a model's states."""

    layer: int
    name: str
    """The name of the state format."""
    index: int = 0
    """Tells apart the states of a layer that has several of one format."""
