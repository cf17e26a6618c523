"""The NVFP4 weight format: E2M1 codes, an E4M3 scale per 16, one fp32 scale for the whole tensor."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .int4 import unpack_nibbles

GROUP_SIZE = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class NVFP4Weight:
    """A linear layer's weight in NVFP4, `w[n, k] = e2m1(code[n, k]) * scale[n, k//16] * global_scale`.

    codes:        uint8 [N, K/2], the low nibble is the even k; bit 3 of a nibble is the sign
    scale:        float8_e4m3fn [N, K/16]
    global_scale: fp32 scalar, a multiplier (amax / 2688)
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor

    group_size = GROUP_SIZE

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight it stands for."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [N, K] in `dtype`, computed in fp32 and rounded once: the definition of truth."""
        n, k = self.shape
        magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=self.codes.device)
        codes = unpack_nibbles(self.codes)
        values = magnitudes[(codes & 7).long()] * (1.0 - 2.0 * (codes >> 3).float())
        scale = self.scale.float() * self.global_scale.float()
        return (values.view(n, -1, GROUP_SIZE) * scale.unsqueeze(-1)).view(n, k).to(dtype)

    def to(self, device: torch.device | str) -> "NVFP4Weight":
        return NVFP4Weight(self.codes.to(device), self.scale.to(device), self.global_scale.to(device))
