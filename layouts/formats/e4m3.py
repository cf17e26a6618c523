"""E4M3, the eight-bit float of FP8 formats, and inputs that are rounded to it token by token while serving.

Three bits of mantissa, values to ±448, no infinity. Rounding errs by at most 2^-4 of a value, and by 2^-10
times the scale among subnormals.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclass(frozen=True)
class E4M3Input:
    """Rounds each token's input to E4M3 with its own float32 scale: its largest magnitude becomes 448.

    Nothing is stored or calibrated (compressed-tensors: strategy `token`, `dynamic: true`).
    """

    label: ClassVar[str] = "FP8"

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """E4M3 codes [..., K] of x [..., K], and the fp32 scales [..., 1] that multiply them."""
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True) / E4M3_MAX
        # The scale of tiny numbers is rounded itself, so that codes could pass the largest one.
        codes = torch.where(scale > 0, wide / scale, 0.0).clamp(-E4M3_MAX, E4M3_MAX)
        return codes.to(E4M3), scale

    def round(self, x: Tensor) -> Tensor:
        codes, scale = self.codes(x)
        return (codes.float() * scale).to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "E4M3Input":
        return self


PER_TOKEN = E4M3Input()
