"""The NVFP4 format, of weights and of inputs: E2M1 codes, an E4M3 scale per 16 values, and one fp32 scale for
all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .int4 import unpack_nibbles
from .weight_format import WEIGHT_FORMATS, Weight

GROUP_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX, E4M3_SMALLEST = 448.0, 2.0**-9
EXAMPLE_SCALE = 2.0**-6
"""The global scale of inputs that a layout is measured with, which are standard normal."""


@dataclass(frozen=True)
class NVFP4:
    """NVFP4. All rows of an NVFP4 weight share one global scale, so weights can be merged only if their
    global scales are equal.
    """

    name: ClassVar[str] = "nvfp4"
    shared: ClassVar[tuple[str, ...]] = ("global_scale",)
    column_multiple: ClassVar[int] = GROUP_SIZE

    activations: bool = False
    """Whether the layer's inputs are NVFP4 too (W4A4), with a global scale that calibration finds."""

    def __post_init__(self) -> None:
        if not isinstance(self.activations, bool):
            raise ValueError(f"`activations` is true or false, not {self.activations!r}")

    @property
    def example_input(self) -> "NVFP4Input | None":
        """How inputs are rounded while layouts are measured; a checkpoint has a scale for each layer."""
        return NVFP4Input(torch.tensor(EXAMPLE_SCALE), divides=False) if self.activations else None

    @property
    def label(self) -> str:
        return "NVFP4, inputs too (fast on Blackwell only)" if self.activations else "NVFP4"

    @property
    def key(self) -> str:
        return "nvfp4 w4a4" if self.activations else "nvfp4"

    @property
    def weight_class(self) -> "type[NVFP4Weight]":
        return NVFP4Weight

    def refuses(self, n: int, k: int) -> str | None:
        return f"K = {k} is no multiple of {GROUP_SIZE}" if k % GROUP_SIZE else None

    def nearest(self, n: int, k: int) -> None:
        return None

    def beside_experts(self) -> "NVFP4":
        return self

    def bits_per_weight(self, n: int, k: int) -> float:
        return 4 + 8 / GROUP_SIZE + 32 / (n * k)

    def nbytes(self, n: int, k: int) -> int:
        return n * k // 2 + n * k // GROUP_SIZE + 4

    def random(self, n: int, k: int, device: torch.device) -> "NVFP4Weight":
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        scale = torch.rand(n, k // GROUP_SIZE, device=device).add(0.5).to(torch.float8_e4m3fn)
        return NVFP4Weight(self, codes, scale, torch.tensor(0.01, device=device))

    @classmethod
    def variants(cls) -> "list[NVFP4]":
        return [cls()]


@dataclass(frozen=True)
class NVFP4Weight(Weight):
    """A linear layer's weight in NVFP4, `w[n, k] = e2m1(code[n, k]) * scale[n, k//16] * global_scale`.

    codes:        uint8 [N, K/2], the low nibble is the even k; bit 3 of a nibble is the sign
    scale:        float8_e4m3fn [N, K/16]
    global_scale: fp32 scalar, a multiplier (amax / 2688)
    """

    spec: NVFP4
    codes: Tensor
    scale: Tensor
    global_scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        n, k = self.shape
        values = from_e2m1(unpack_nibbles(self.codes))
        scale = self.scale.float() * self.global_scale.float()
        return (values.view(n, -1, GROUP_SIZE) * scale.unsqueeze(-1)).view(n, k).to(dtype)


@dataclass(frozen=True)
class NVFP4Input:
    """Rounds the input of a linear layer to NVFP4, for checkpoints with NVFP4 on both sides (W4A4).

    Each token gets scales of its own, one E4M3 scale for 16 consecutive k; only the global scale is stored.
    The rounding gives W4A4's results without hardware that multiplies FP4: x is rounded to the values that
    such hardware would be given.

    global_scale: fp32 scalar found by calibration, a multiplier (amax / 2688) or, with `divides`, a divisor
    divides:      use compressed-tensors' arithmetic instead of ModelOpt's. The two differ in last bits and in
                  the smallest scales, which after a few layers leads to other codes: 0.009 nats on a small
                  model
    """

    label: ClassVar[str] = "NVFP4"
    hardware: ClassVar[str] = "NVIDIA GPUs of compute capability 10.0 or higher"

    global_scale: Tensor
    divides: bool

    def round(self, x: Tensor) -> Tensor:
        """Round x [..., K] to the nearest values of NVFP4, in x's dtype."""
        groups = x.unflatten(-1, (-1, GROUP_SIZE))
        scales = self._scales(groups.abs().amax(-1, keepdim=True))
        # A group whose scale rounds to zero becomes zeros.
        codes = torch.where(scales > 0, groups / scales, 0.0)
        return (_round_to_e2m1(codes) * scales).flatten(-2).to(x.dtype)

    def _scales(self, largest: Tensor) -> Tensor:
        """Return the scale of each group, fp32, from its largest magnitude."""
        if self.divides:
            wanted = self.global_scale * (largest / E2M1_MAX).float()
            return _as_e4m3(wanted) / self.global_scale
        wanted = largest.float() / (E2M1_MAX * self.global_scale)
        return _as_e4m3(wanted.clamp(min=E4M3_SMALLEST)) * self.global_scale

    def tensors(self) -> dict[str, Tensor]:
        return {"global_scale": self.global_scale}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "NVFP4Input":
        return NVFP4Input(tensors["global_scale"], self.divides)


def from_e2m1(codes: Tensor) -> Tensor:
    """Return the fp32 values of uint8 codes. The values are computed by arithmetic, since a CUDA graph cannot
    copy a table from the host.
    """
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    quarters = torch.where(exponent == 0, 2 * mantissa, (2 + mantissa) << exponent)
    return quarters.float() * 0.25 * (1.0 - 2.0 * (codes >> 3).float())


def _as_e4m3(x: Tensor) -> Tensor:
    return x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()


def _round_to_e2m1(x: Tensor) -> Tensor:
    """Return the nearest E2M1 value, ties to the even code. Values are 0.5 apart below 2, 1 apart from 2 to
    4, and 2 apart above."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (magnitude / spacing).round() * spacing * x.sign()


WEIGHT_FORMATS.add(NVFP4.name, NVFP4)
