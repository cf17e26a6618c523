"""INT4: four-bit codes, a scale and a zero point for each group of consecutive columns; inputs may be FP8."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .e4m3 import E4M3Input
from .weight_format import WEIGHT_FORMATS, Weight

ZERO_POINTS = ("integer", "fractional")
SYMMETRIC_ZERO = 8
"""Codes are unsigned: the symmetric range -8..7 is 0..15 with its zero at 8."""
SMALLEST_GROUP = 16
COMMON_GROUPS = (128, 64, 32, 16)
UNQUANTIZED, FP8_INPUTS = "unquantized", "fp8"
ACTIVATIONS = (UNQUANTIZED, FP8_INPUTS)
BY_INT4 = E4M3Input(hardware="NVIDIA GPUs of compute capability 9.0 (H100, H200)")
"""Engines have this product for Hopper alone."""
SCALE_BITS, INTEGER_ZERO_BITS, FRACTIONAL_ZERO_BITS = 16, 4, 16


@dataclass(frozen=True)
class Int4:
    """INT4 with its parameters."""

    name: ClassVar[str] = "int4"
    shared: ClassVar[tuple[str, ...]] = ()

    group_size: int = 128
    """Consecutive weights of a row that share a scale and a zero point: a multiple of 16."""
    symmetric: bool = False
    """Whether all zero points are 8."""
    zero_point: str = "integer"
    """`integer` or `fractional`. Fractional ones are torchao's HQQ, which only its convention can store."""
    activations: str = UNQUANTIZED
    """`fp8`: the layer's inputs are rounded to E4M3 (W4A8), with a scale for each token as it comes."""

    def __post_init__(self) -> None:
        size = self.group_size
        if isinstance(size, bool) or not isinstance(size, int) or size < SMALLEST_GROUP:
            raise ValueError(f"`group_size` is a whole number of at least {SMALLEST_GROUP}, not {size!r}")
        if size % SMALLEST_GROUP:
            raise ValueError(f"`group_size` is a multiple of {SMALLEST_GROUP}, not {size}")
        if not isinstance(self.symmetric, bool):
            raise ValueError(f"`symmetric` is true or false, not {self.symmetric!r}")
        if self.zero_point not in ZERO_POINTS:
            raise ValueError(f"`zero_point` is one of {', '.join(ZERO_POINTS)}; not {self.zero_point!r}")
        if self.symmetric and not self.has_integer_zero:
            raise ValueError("`zero_point: fractional` and `symmetric: true` exclude each other")
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"`activations` is one of {', '.join(ACTIVATIONS)}; not {self.activations!r}")
        if self.activations == FP8_INPUTS and not self.symmetric:
            raise ValueError(
                "`activations: fp8` needs `symmetric: true`: engines read no zero points with FP8 inputs"
            )

    @property
    def has_integer_zero(self) -> bool:
        return self.zero_point == "integer"

    @property
    def dynamic_input(self) -> E4M3Input | None:
        return BY_INT4 if self.activations == FP8_INPUTS else None

    @property
    def label(self) -> str:
        zero = "symmetric" if self.symmetric else "zero points"
        zero = zero if self.has_integer_zero else "fractional zero points"
        inputs = ", FP8 inputs" if self.activations == FP8_INPUTS else ""
        return f"INT4 g{self.group_size}, {zero}{inputs}"

    @property
    def key(self) -> str:
        zero = "sym" if self.symmetric else "zp" if self.has_integer_zero else "fractional zp"
        inputs = " fp8 inputs" if self.activations == FP8_INPUTS else ""
        return f"int4 g{self.group_size} {zero}{inputs}"

    @property
    def column_multiple(self) -> int:
        return self.group_size

    def groups(self, k: int) -> int:
        """Return how many groups a row of `k` weights has."""
        return k // self.group_size

    @property
    def weight_class(self) -> "type[Int4Weight]":
        return Int4Weight

    def refuses(self, n: int, k: int) -> str | None:
        return f"K = {k} is no multiple of group size {self.group_size}" if k % self.group_size else None

    def nearest(self, n: int, k: int) -> "Int4 | None":
        size = next((size for size in COMMON_GROUPS if k % size == 0), None)
        return None if size is None else replace(self, group_size=size)

    def beside_experts(self) -> "Int4":
        """Return the same spec without zero points, which transformers does not read for experts, nor vLLM
        for gpt-oss' experts.
        """
        return replace(self, symmetric=True) if self.has_integer_zero else self

    def bits_per_weight(self, n: int, k: int) -> float:
        zero = 0 if self.symmetric else INTEGER_ZERO_BITS if self.has_integer_zero else FRACTIONAL_ZERO_BITS
        return 4 + (SCALE_BITS + zero) / self.group_size

    def nbytes(self, n: int, k: int) -> int:
        """Return the size of the codes, and for each group of a two-byte scale and a zero point of at most
        one byte."""
        return n * k // 2 + 3 * n * k // self.group_size

    def random(self, n: int, k: int, device: torch.device) -> "Int4Weight":
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        groups = self.groups(k)
        scale = (torch.rand(n, groups, device=device) + 0.5).mul(0.01).to(torch.bfloat16)
        if self.symmetric:
            zero = torch.full((n, groups), SYMMETRIC_ZERO, dtype=torch.uint8, device=device)
        elif self.has_integer_zero:
            zero = torch.randint(0, 16, (n, groups), dtype=torch.uint8, device=device)
        else:
            zero = torch.rand(n, groups, device=device).mul(15)
        return Int4Weight(self, codes, scale, zero)

    @classmethod
    def variants(cls) -> "list[Int4]":
        return [cls(), cls(symmetric=True, activations=FP8_INPUTS)]


@dataclass(frozen=True)
class Int4Weight(Weight):
    """A linear layer's 4-bit weight, `w[n, k] = (code[n, k] - zero[n, k//g]) * scale[n, k//g]`.

    codes:      uint8 [N, K/2], the low nibble is the even k, values 0..15
    scale:      float (bf16, fp16 or fp32) [N, K/g]
    zero_point: [N, K/g]: uint8 for integers 0..15, a float dtype if fractional (torchao's HQQ). Symmetric
                weights store the constant 8
    """

    spec: Int4
    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        n, k = self.shape
        codes = unpack_nibbles(self.codes).view(n, self.spec.groups(k), self.spec.group_size)
        centred = codes.float() - self.zero_point.float().unsqueeze(-1)
        return (centred * self.scale.float().unsqueeze(-1)).view(n, k).to(dtype)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., K] of 0..15 into uint8 [..., K/2], the even k in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., K/2] to uint8 codes [..., K], as the inverse of `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


WEIGHT_FORMATS.add(Int4.name, Int4)
