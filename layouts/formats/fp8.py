"""FP8 (W8A8): E4M3 weights with a scale for each row, for all or for each block, and inputs in E4M3."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .e4m3 import BLOCK, E4M3, PER_BLOCK, PER_TOKEN, E4M3Input, E4M3StaticInput
from .weight_format import WEIGHT_FORMATS, Weight

ROW, TENSOR, BLOCKS = "row", "tensor", "block"
SCALES = (ROW, TENSOR, BLOCKS)
DYNAMIC, STATIC = "dynamic", "static"
SCALE_BITS, BLOCK_SCALE_BITS = 16, 32
EXAMPLE_SCALE = 2.0**-6
"""The scale of inputs that a layout is measured with, which are standard normal."""


@dataclass(frozen=True)
class FP8:
    """FP8 with its parameters. A layer's inputs are rounded too."""

    name: ClassVar[str] = "fp8"

    scale: str = ROW
    """What shares a scale: a `row`; the whole `tensor`, including all weights merged with it; or a `block` of
    128 rows and 128 columns as in DeepSeek-V3, in which case inputs have a scale for every 128 channels."""
    activations: str = DYNAMIC
    """Where the scales of inputs come from: `dynamic`, computed while serving; `static`, one scale for all
    inputs of a layer, found on a calibration text."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"`scale` is one of {', '.join(SCALES)}; not {self.scale!r}")
        if self.activations not in (DYNAMIC, STATIC):
            raise ValueError(f"`activations` is {DYNAMIC} or {STATIC}; not {self.activations!r}")
        if self.is_static and self.scale == BLOCKS:
            raise ValueError(f"`activations: {STATIC}` needs `scale: {TENSOR}` or `scale: {ROW}`")

    @property
    def is_static(self) -> bool:
        return self.activations == STATIC

    @property
    def shared(self) -> tuple[str, ...]:
        return ("scale",) if self.scale == TENSOR else ()

    @property
    def dynamic_input(self) -> E4M3Input | None:
        if self.is_static:
            return None
        return PER_BLOCK if self.scale == BLOCKS else PER_TOKEN

    @property
    def example_input(self) -> E4M3StaticInput | None:
        """How inputs are rounded while layouts are measured; a checkpoint has a scale for each layer."""
        return E4M3StaticInput(torch.tensor(EXAMPLE_SCALE)) if self.is_static else None

    @property
    def column_multiple(self) -> int:
        return BLOCK if self.scale == BLOCKS else 1

    @property
    def rows_together(self) -> int:
        return BLOCK if self.scale == BLOCKS else 1

    @property
    def label(self) -> str:
        if self.scale == BLOCKS:
            return f"FP8, blocks of {BLOCK}x{BLOCK}, inputs too (a scale for {BLOCK})"
        of_inputs = "a calibrated scale" if self.is_static else "a scale a token"
        return f"FP8, a scale a {self.scale}, inputs too ({of_inputs})"

    @property
    def key(self) -> str:
        return f"fp8 {self.scale} {STATIC}" if self.is_static else f"fp8 {self.scale}"

    @property
    def weight_class(self) -> "type[FP8Weight]":
        return FP8Weight

    def refuses(self, n: int, k: int) -> str | None:
        return f"K = {k} is no multiple of {self.column_multiple}" if k % self.column_multiple else None

    def nearest(self, n: int, k: int) -> "FP8 | None":
        return self if self.refuses(n, k) is None else None

    def beside_experts(self) -> "FP8":
        return self

    def bits_per_weight(self, n: int, k: int) -> float:
        return 8 + self._scale_bits(n, k) / (n * k)

    def nbytes(self, n: int, k: int) -> int:
        return n * k + self._scale_bits(n, k) // 8

    def random(self, n: int, k: int, device: torch.device) -> "FP8Weight":
        codes = torch.randn(n, k, device=device).mul(100).clamp(-448, 448).to(E4M3)
        if self.scale == BLOCKS:
            blocks = torch.rand(-(-n // BLOCK), k // BLOCK, device=device).add(0.5).mul(0.0002)
            return FP8Weight(self, codes, to_rows(blocks, n))
        shape = (n, 1) if self.scale == ROW else ()
        scale = torch.rand(shape, device=device).add(0.5).mul(0.0002).to(torch.bfloat16)
        return FP8Weight(self, codes, scale)

    @classmethod
    def variants(cls) -> "list[FP8]":
        return [cls(), cls(BLOCKS)]

    def _scale_bits(self, n: int, k: int) -> int:
        if self.scale == BLOCKS:
            return BLOCK_SCALE_BITS * -(-n // BLOCK) * -(-k // BLOCK)
        return SCALE_BITS * (n if self.scale == ROW else 1)


@dataclass(frozen=True)
class FP8Weight(Weight):
    """A linear layer's weight in FP8, `w[n, k] = code[n, k] * scale[n, k//g]`.

    codes: float8_e4m3fn [N, K]
    scale: float (bf16, fp16 or fp32) [N, 1], or a scalar for the whole weight; of blocks [N, K/128], in which
           each row has the scales of its blocks, so that weights of any number of rows merge
    """

    spec: FP8
    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        scale = self.scale.float()
        if self.spec.scale == BLOCKS:
            groups = self.codes.float().unflatten(1, (scale.shape[1], -1))
            return (groups * scale.unsqueeze(-1)).flatten(1).to(dtype)
        return (self.codes.float() * scale).to(dtype)


def to_rows(blocks: Tensor, n: int) -> Tensor:
    """Repeat the scales of blocks [ceil(N/128), K/128] for every row of a block: [N, K/128]."""
    return blocks.repeat_interleave(BLOCK, 0)[:n].contiguous()


def to_blocks(rows: Tensor) -> Tensor:
    """Invert `to_rows`, for a weight whose first row is the first row of a block."""
    return rows[::BLOCK].contiguous()


WEIGHT_FORMATS.add(FP8.name, FP8)
