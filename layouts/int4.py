"""The INT4 weight format: what the numbers mean, and nothing about how a kernel wants them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Int4Weight:
    """A linear layer's 4-bit weight, `w[n, k] = (code[n, k] - zero[n, k//g]) * scale[n, k//g]`.

    codes:      uint8 [N, K/2], the low nibble is the even k, values 0..15
    scale:      float (bf16, fp16 or fp32) [N, K/g]
    zero_point: uint8 [N, K/g] where it is an integer 0..15; a float dtype where it is fractional
                (torchao's HQQ). Symmetric weights carry the constant 8.
    group_size: g, consecutive k that share a scale and a zero
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight it stands for."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def has_integer_zero(self) -> bool:
        return not self.zero_point.dtype.is_floating_point

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [N, K] in `dtype`, computed in fp32 and rounded once: the definition of truth."""
        n, k = self.shape
        codes = unpack_nibbles(self.codes).view(n, k // self.group_size, self.group_size)
        centred = codes.float() - self.zero_point.float().unsqueeze(-1)
        return (centred * self.scale.float().unsqueeze(-1)).view(n, k).to(dtype)

    def to(self, device: torch.device | str) -> "Int4Weight":
        return Int4Weight(
            self.codes.to(device), self.scale.to(device), self.zero_point.to(device), self.group_size
        )


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] of 0..15 to uint8 [..., K/2], the low nibble the even k."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] to uint8 codes [..., K]; undoes `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
