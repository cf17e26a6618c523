"""E4M3, the eight-bit float of FP8 formats, and inputs that are rounded to it while serving.

A number has three bits of mantissa, values reach ±448, and there is no infinity. Rounding errs by at most
2^-4 of a value, and by 2^-10 times the scale among subnormals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
HARDWARE = "NVIDIA GPUs of compute capability 8.9 or higher"


@dataclass(frozen=True)
class E4M3Input:
    """Rounds each token's input to E4M3 with its own float32 scales: the largest magnitude becomes 448.

    Nothing is stored or calibrated (compressed-tensors: strategy `token` or `group`, `dynamic: true`).

    group_size: consecutive inputs that share a scale; None for all inputs of a token
    hardware:   what multiplies inputs of this format by the weights that they belong to
    """

    group_size: int | None = None
    hardware: str = field(default=HARDWARE, compare=False)

    @property
    def label(self) -> str:
        return "FP8" if self.group_size is None else f"FP8 in groups of {self.group_size}"

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return E4M3 codes [..., K] of x [..., K], and the fp32 scales [..., groups] that multiply the
        codes.
        """
        groups = x.float().unflatten(-1, (-1, self.group_size or x.shape[-1]))
        # Torch multiplies by the reciprocal of a Python number on a GPU, which is another number.
        scale = groups.abs().amax(-1) / groups.new_full((), E4M3_MAX)
        wide = scale.unsqueeze(-1)
        # The scale of tiny numbers is rounded itself, so that codes could pass the largest one.
        codes = torch.where(wide > 0, groups / wide, 0.0).clamp(-E4M3_MAX, E4M3_MAX)
        return codes.flatten(-2).to(E4M3), scale

    def round(self, x: Tensor) -> Tensor:
        codes, scale = self.codes(x)
        groups = codes.float().unflatten(-1, (scale.shape[-1], -1))
        return (groups * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "E4M3Input":
        return self


@dataclass(frozen=True)
class E4M3StaticInput:
    """Rounds inputs to E4M3 with one scale, which calibration found; larger inputs become the largest code.

    scale: fp32 scalar, a multiplier (compressed-tensors: strategy `tensor`, `dynamic: false`)
    """

    label: ClassVar[str] = "statically scaled FP8"
    hardware: ClassVar[str] = HARDWARE

    scale: Tensor

    def round(self, x: Tensor) -> Tensor:
        """Round x [..., K] in x's dtype: exactly, if the scale is a power of two."""
        codes = (x.float() / self.scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
        return (codes.float() * self.scale).to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "E4M3StaticInput":
        return E4M3StaticInput(tensors["scale"])


BLOCK = 128
PER_TOKEN, PER_BLOCK = E4M3Input(), E4M3Input(BLOCK)
