"""How a checkpoint may have a linear layer's input rounded: its activations are quantized as well."""

from collections.abc import Mapping
from typing import Protocol, Self

from torch import Tensor


class InputFormat(Protocol):
    """How a layer's input is rounded before the product; frozen, equal where it rounds alike."""

    @property
    def label(self) -> str:
        """For people: `NVFP4`."""
        ...

    def round(self, x: Tensor) -> Tensor:
        """x [..., K] to the nearest that the format can say, in x's dtype."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What it holds, by name."""
        ...

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self: ...
