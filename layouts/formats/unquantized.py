"""Unquantized weights, in the activations' dtype: the format that all others are compared with."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .weight_format import WEIGHT_FORMATS, Weight


@dataclass(frozen=True)
class Unquantized:
    """No quantization. The format has no parameters: its dtype is that of the activations."""

    name: ClassVar[str] = "unquantized"
    shared: ClassVar[tuple[str, ...]] = ()
    column_multiple: ClassVar[int] = 1
    label: ClassVar[str] = "unquantized"
    key: ClassVar[str] = "unquantized"

    @property
    def weight_class(self) -> "type[UnquantizedWeight]":
        return UnquantizedWeight

    def refuses(self, n: int, k: int) -> str | None:
        return None

    def nearest(self, n: int, k: int) -> "Unquantized":
        return self

    def beside_experts(self) -> "Unquantized":
        return self

    def bits_per_weight(self, n: int, k: int) -> float:
        """The size is 16 bits, since nearly all checkpoints are in 16 bits."""
        return 16.0

    def nbytes(self, n: int, k: int) -> int:
        return 2 * n * k

    def random(self, n: int, k: int, device: torch.device) -> "UnquantizedWeight":
        return UnquantizedWeight(self, torch.randn(n, k, device=device) * 0.02)

    @classmethod
    def variants(cls) -> "list[Unquantized]":
        return [cls()]


@dataclass(frozen=True)
class UnquantizedWeight(Weight):
    """A linear layer's unquantized weight. values: [N, K] in any float dtype."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.values.to(dtype)


WEIGHT_FORMATS.add(Unquantized.name, Unquantized)
