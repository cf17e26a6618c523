"""The MXFP4 format (OCP Microscaling): E2M1 codes with an E8M0 scale, a power of two, for every 32."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .int4 import unpack_nibbles
from .nvfp4 import from_e2m1
from .weight_format import WEIGHT_FORMATS, Weight

GROUP_SIZE = 32
BIAS, NAN = 127, 255
"""Of E8M0: a byte b is 2^(b - 127), and 255 is no number."""


@dataclass(frozen=True)
class MXFP4:
    """MXFP4 weights; inputs keep 16 bits. Every weight is exact in bf16."""

    name: ClassVar[str] = "mxfp4"
    shared: ClassVar[tuple[str, ...]] = ()
    column_multiple: ClassVar[int] = GROUP_SIZE
    label: ClassVar[str] = "MXFP4"
    key: ClassVar[str] = "mxfp4"

    @property
    def weight_class(self) -> "type[MXFP4Weight]":
        return MXFP4Weight

    def refuses(self, n: int, k: int) -> str | None:
        return f"K = {k} is no multiple of {GROUP_SIZE}" if k % GROUP_SIZE else None

    def nearest(self, n: int, k: int) -> "MXFP4 | None":
        return self if self.refuses(n, k) is None else None

    def beside_experts(self) -> "MXFP4":
        return self

    def bits_per_weight(self, n: int, k: int) -> float:
        return 4 + 8 / GROUP_SIZE

    def nbytes(self, n: int, k: int) -> int:
        return n * k // 2 + n * k // GROUP_SIZE

    def random(self, n: int, k: int, device: torch.device) -> "MXFP4Weight":
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        scale = torch.randint(BIAS - 8, BIAS - 5, (n, k // GROUP_SIZE), dtype=torch.uint8, device=device)
        return MXFP4Weight(self, codes, scale)

    @classmethod
    def variants(cls) -> "list[MXFP4]":
        return [cls()]


@dataclass(frozen=True)
class MXFP4Weight(Weight):
    """A linear layer's weight in MXFP4, `w[n, k] = e2m1(code[n, k]) * 2^(scale[n, k//32] - 127)`.

    codes: uint8 [N, K/2], the low nibble is the even k; bit 3 of a nibble is the sign
    scale: uint8 [N, K/32], E8M0
    """

    spec: MXFP4
    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        groups = from_e2m1(unpack_nibbles(self.codes)).unflatten(1, (-1, GROUP_SIZE))
        return (groups * from_e8m0(self.scale).unsqueeze(-1)).flatten(1).to(dtype)


def from_e8m0(scale: Tensor) -> Tensor:
    """Return the fp32 values of E8M0 bytes: their bits are a float32's exponent, but for the least one."""
    bits = scale.to(torch.int32) << 23
    smallest = torch.full_like(bits, 1 << 22)  # 2^-127 is a subnormal
    return torch.where(scale == 0, smallest, bits).view(torch.float32)


WEIGHT_FORMATS.add(MXFP4.name, MXFP4)
