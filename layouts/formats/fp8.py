"""FP8 (W8A8): E4M3 weights with a scale for each row or one for all, and inputs in E4M3 with a scale for each
token.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .e4m3 import E4M3, PER_TOKEN, E4M3Input
from .weight_format import WEIGHT_FORMATS, Weight

ROW, TENSOR = "row", "tensor"
SCALES = (ROW, TENSOR)
SCALE_BITS = 16


@dataclass(frozen=True)
class FP8:
    """FP8 with its parameter. A layer's inputs are rounded too, with scales computed while serving."""

    name: ClassVar[str] = "fp8"
    column_multiple: ClassVar[int] = 1

    scale: str = ROW
    """What shares a scale: `row` or `tensor`. Weights that are merged share a `tensor`'s."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"`scale` is one of {', '.join(SCALES)}; not {self.scale!r}")

    @property
    def shared(self) -> tuple[str, ...]:
        return ("scale",) if self.scale == TENSOR else ()

    @property
    def dynamic_input(self) -> E4M3Input:
        return PER_TOKEN

    @property
    def label(self) -> str:
        return f"FP8, a scale a {self.scale}, inputs too (a scale a token)"

    @property
    def key(self) -> str:
        return f"fp8 {self.scale}"

    @property
    def weight_class(self) -> "type[FP8Weight]":
        return FP8Weight

    def refuses(self, n: int, k: int) -> str | None:
        return None

    def nearest(self, n: int, k: int) -> "FP8":
        return self

    def beside_experts(self) -> "FP8":
        return self

    def bits_per_weight(self, n: int, k: int) -> float:
        return 8 + SCALE_BITS * self._scales(n) / (n * k)

    def nbytes(self, n: int, k: int) -> int:
        return n * k + 2 * self._scales(n)

    def random(self, n: int, k: int, device: torch.device) -> "FP8Weight":
        codes = torch.randn(n, k, device=device).mul(100).clamp(-448, 448).to(E4M3)
        shape = (n, 1) if self.scale == ROW else ()
        scale = torch.rand(shape, device=device).add(0.5).mul(0.0002).to(torch.bfloat16)
        return FP8Weight(self, codes, scale)

    @classmethod
    def variants(cls) -> "list[FP8]":
        return [cls(), cls(TENSOR)]

    def _scales(self, n: int) -> int:
        return n if self.scale == ROW else 1


@dataclass(frozen=True)
class FP8Weight(Weight):
    """A linear layer's weight in FP8, `w[n, k] = code[n, k] * scale[n]`.

    codes: float8_e4m3fn [N, K]
    scale: float (bf16, fp16 or fp32) [N, 1], or a scalar for the whole weight
    """

    spec: FP8
    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (self.codes.float() * self.scale.float()).to(dtype)


WEIGHT_FORMATS.add(FP8.name, FP8)
