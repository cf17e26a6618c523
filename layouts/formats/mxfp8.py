"""The MXFP8 format (OCP Microscaling): E4M3 codes with an E8M0 scale, a power of two, for every 32; inputs
too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .e4m3 import E4M3, E4M3_MAX
from .mxfp4 import BIAS, GROUP_SIZE, from_e8m0
from .weight_format import WEIGHT_FORMATS, Weight

LARGEST_EXPONENT = 8
"""Of a code: 448 is 1.75 * 2^8."""
MANTISSA_BITS, UP_FROM = 23, 1 << 21
"""Of float32; adding a quarter to a mantissa of 1.75 or more raises the exponent."""
MOST = 254
"""The largest byte of a scale: 255 is no number."""


@dataclass(frozen=True)
class MXFP8:
    """MXFP8 weights and inputs (W8A8). Every weight is exact in bf16."""

    name: ClassVar[str] = "mxfp8"
    shared: ClassVar[tuple[str, ...]] = ()
    column_multiple: ClassVar[int] = GROUP_SIZE
    label: ClassVar[str] = "MXFP8, inputs too (fast on Blackwell only)"
    key: ClassVar[str] = "mxfp8"

    @property
    def dynamic_input(self) -> "MXFP8Input":
        return PER_GROUP

    @property
    def weight_class(self) -> "type[MXFP8Weight]":
        return MXFP8Weight

    def refuses(self, n: int, k: int) -> str | None:
        return f"K = {k} is no multiple of {GROUP_SIZE}" if k % GROUP_SIZE else None

    def nearest(self, n: int, k: int) -> "MXFP8 | None":
        return self if self.refuses(n, k) is None else None

    def beside_experts(self) -> "MXFP8":
        return self

    def bits_per_weight(self, n: int, k: int) -> float:
        return 8 + 8 / GROUP_SIZE

    def nbytes(self, n: int, k: int) -> int:
        return n * k + n * k // GROUP_SIZE

    def random(self, n: int, k: int, device: torch.device) -> "MXFP8Weight":
        codes = torch.randn(n, k, device=device).mul(100).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
        scale = torch.randint(BIAS - 14, BIAS - 11, (n, k // GROUP_SIZE), dtype=torch.uint8, device=device)
        return MXFP8Weight(self, codes, scale)

    @classmethod
    def variants(cls) -> "list[MXFP8]":
        return [cls()]


@dataclass(frozen=True)
class MXFP8Weight(Weight):
    """A linear layer's weight in MXFP8, `w[n, k] = code[n, k] * 2^(scale[n, k//32] - 127)`.

    codes: float8_e4m3fn [N, K]
    scale: uint8 [N, K/32], E8M0
    """

    spec: MXFP8
    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        groups = self.codes.float().unflatten(1, (-1, GROUP_SIZE))
        return (groups * from_e8m0(self.scale).unsqueeze(-1)).flatten(1).to(dtype)


@dataclass(frozen=True)
class MXFP8Input:
    """Rounds inputs to MXFP8, with the least power of two for every 32 under which none of them is clipped.

    A group whose largest code would be exactly 448 gets the next power of two, as in compressed-tensors
    (`generate_mx_scales`). Nothing is stored or calibrated.
    """

    label: ClassVar[str] = "MXFP8"
    hardware: ClassVar[str] = "NVIDIA GPUs of compute capability 10.0 or higher"

    def round(self, x: Tensor) -> Tensor:
        """Round x [..., K] in x's dtype: exactly in bf16, but for subnormals of it."""
        groups = x.float().unflatten(-1, (-1, GROUP_SIZE))
        scale = from_e8m0(scale_bytes(groups.abs().amax(-1, keepdim=True)))
        codes = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
        return (codes.float() * scale).flatten(-2).to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "MXFP8Input":
        return self


def scale_bytes(largest: Tensor) -> Tensor:
    """Return the E8M0 bytes, int32, of groups whose largest magnitude is `largest`, fp32."""
    exponent = (largest.view(torch.int32) + UP_FROM) >> MANTISSA_BITS
    return (exponent - LARGEST_EXPONENT).clamp(0, MOST)


PER_GROUP = MXFP8Input()

WEIGHT_FORMATS.add(MXFP8.name, MXFP8)
