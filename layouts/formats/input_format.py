"""How a linear layer's input is rounded, for checkpoints that quantize activations too."""

from collections.abc import Mapping
from typing import Protocol, Self

from torch import Tensor


class InputFormat(Protocol):
    """How a layer's input is rounded before the product. Frozen; two are equal if they round alike."""

    @property
    def label(self) -> str:
        """For people: `NVFP4`."""
        ...

    def round(self, x: Tensor) -> Tensor:
        """x [..., K] rounded to the nearest values of the format, in x's dtype."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        ...

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self: ...
