"""The torchao seam: one of torchao's tensor subclasses, read from a safetensors header's entry and written.

Each weight format has a file that is registered here; `torchao.py` is the convention that consists of these
forms.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from ...base.registry import Registry
from ...layouts.formats.weight_format import Weight, WeightFormat
from ..checkpoints.checkpoint import Checkpoint
from .convention import StoredWeight

Reader = Callable[[Checkpoint, str, Mapping[str, Any]], StoredWeight]
READERS: Registry[Reader] = Registry("torchao tensor class")
"""For each tensor class of torchao, the reader of a weight from the header's entry."""


class Form(Protocol):
    """The tensor subclass that a weight format is written as."""

    @property
    def kind(self) -> str:
        """Return the class's name."""
        ...

    def refuses(self, spec: WeightFormat) -> str | None:
        """Return None if the class can hold weights of `spec`, otherwise the reason in a few words."""
        ...

    def tensors(self, module: str, weight: Weight) -> dict[str, Tensor]:
        """Return the checkpoint tensors that stand for `<module>.weight`, by full name."""
        ...

    def described(self, spec: WeightFormat, shape: tuple[int, int]) -> dict[str, Any]:
        """Return the header's entry for a weight: `_data` and `_tensor_data_names`."""
        ...

    def config(self, spec: WeightFormat) -> dict[str, Any]:
        """Return the torchao config that makes such weights, as transformers stores it."""
        ...

    def bits_per_weight(self, spec: WeightFormat, n: int, k: int) -> float: ...


FORMS: Registry[Form] = Registry("torchao form")
"""The form of each weight format."""
