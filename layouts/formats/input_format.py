"""How a linear layer's input is rounded, for checkpoints that quantize activations too."""

from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor


class InputFormat(Protocol):
    """How a layer's input is rounded before the product. Input formats are frozen; two formats are equal if
    they round alike.
    """

    @property
    def label(self) -> str:
        """For people: `NVFP4`."""
        ...

    @property
    def hardware(self) -> str:
        """Return a text that says what hardware multiplies the format: `NVIDIA GPUs of compute capability
        10.0 or higher`.
        """
        ...

    def round(self, x: Tensor) -> Tensor:
        """Round x [..., K] to the nearest values of the format, in x's dtype."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the format's tensors by name."""
        ...

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self: ...


@runtime_checkable
class RoundsInputs(Protocol):
    """A weight format that rounds inputs while serving, with no scales in the checkpoint."""

    @property
    def dynamic_input(self) -> InputFormat | None:
        """Return how the inputs are rounded; None if the parameters leave inputs unrounded."""
        ...


@runtime_checkable
class StoresInputScales(Protocol):
    """A weight format that may round inputs by scales that a checkpoint has for each layer."""

    @property
    def example_input(self) -> InputFormat | None:
        """How inputs are rounded while layouts are measured; None if the parameters leave them unrounded."""
        ...


def dynamic_input(spec: Any) -> InputFormat | None:
    """Return how a layer's input is rounded if its weight's spec alone decides it; else None."""
    return spec.dynamic_input if isinstance(spec, RoundsInputs) else None


def example_input(spec: Any) -> InputFormat | None:
    """How inputs are rounded while layouts are measured, if each layer's checkpoint decides it; else None."""
    return spec.example_input if isinstance(spec, StoresInputScales) else None
