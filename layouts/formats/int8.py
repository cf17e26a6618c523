"""INT8: signed eight-bit codes with a scale for every group of consecutive columns, or for a whole row.

Inputs may be INT8 too, if rows have one scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .weight_format import WEIGHT_FORMATS, Weight

WHOLE_ROW = -1
GROUP_SIZES = (WHOLE_ROW, 32, 64, 128)
"""The sizes that other engines' INT8 kernels support."""
COMMON_GROUPS = (128, 64, 32)
WORD_CODES = 4
"""Number of codes in one word of a checkpoint; a row consists of whole words."""
MIN_CODE, MAX_CODE = -128, 127
SCALE_BITS = 16
UNQUANTIZED, INT8_INPUTS = "unquantized", "int8"
ACTIVATIONS = (UNQUANTIZED, INT8_INPUTS)


@dataclass(frozen=True)
class Int8:
    """INT8 with its parameters. Codes are symmetric: with 256 levels, zero points would gain little."""

    name: ClassVar[str] = "int8"
    shared: ClassVar[tuple[str, ...]] = ()

    group_size: int = 128
    """Consecutive weights of a row that share a scale: 32, 64 or 128; -1 for a whole row."""
    activations: str = UNQUANTIZED
    """`int8`: the layer's inputs are rounded to INT8 (W8A8), with a scale for each token as it comes."""

    def __post_init__(self) -> None:
        size = self.group_size
        if isinstance(size, bool) or not isinstance(size, int) or size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES[1:]))
            raise ValueError(f"`group_size` is one of {sizes}, or {WHOLE_ROW} for whole rows; not {size!r}")
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"`activations` is one of {', '.join(ACTIVATIONS)}; not {self.activations!r}")
        if self.rounds_inputs and self.has_groups:
            raise ValueError(
                f"`activations: {INT8_INPUTS}` needs `group_size: {WHOLE_ROW}`: engines sum whole rows"
            )

    @property
    def has_groups(self) -> bool:
        return self.group_size != WHOLE_ROW

    @property
    def rounds_inputs(self) -> bool:
        return self.activations == INT8_INPUTS

    @property
    def dynamic_input(self) -> "Int8Input | None":
        return PER_TOKEN if self.rounds_inputs else None

    @property
    def label(self) -> str:
        if self.rounds_inputs:
            return "INT8 per row, inputs too (a scale a token)"
        return f"INT8 g{self.group_size}" if self.has_groups else "INT8 per row"

    @property
    def key(self) -> str:
        if self.rounds_inputs:
            return "int8 per row int8 inputs"
        return f"int8 g{self.group_size}" if self.has_groups else "int8 per row"

    @property
    def column_multiple(self) -> int:
        return self.group_size if self.has_groups else WORD_CODES

    def groups(self, k: int) -> int:
        """Return how many groups a row of `k` weights has."""
        return k // self.group_size if self.has_groups else 1

    @property
    def weight_class(self) -> "type[Int8Weight]":
        return Int8Weight

    def refuses(self, n: int, k: int) -> str | None:
        multiple = self.column_multiple
        what = "group size " if self.has_groups else ""
        return f"K = {k} is no multiple of {what}{multiple}" if k % multiple else None

    def nearest(self, n: int, k: int) -> "Int8 | None":
        sizes = (WHOLE_ROW,) if self.rounds_inputs else (self.group_size, *COMMON_GROUPS, WHOLE_ROW)
        specs = (replace(self, group_size=size) for size in sizes)
        return next((spec for spec in specs if spec.refuses(n, k) is None), None)

    def beside_experts(self) -> "Int8":
        return self

    def bits_per_weight(self, n: int, k: int) -> float:
        return 8 + SCALE_BITS * self.groups(k) / k

    def nbytes(self, n: int, k: int) -> int:
        return n * k + 2 * n * self.groups(k)

    def random(self, n: int, k: int, device: torch.device) -> "Int8Weight":
        codes = torch.randint(MIN_CODE, MAX_CODE + 1, (n, k), dtype=torch.int8, device=device)
        scale = torch.rand(n, self.groups(k), device=device).add(0.5).mul(0.0005).to(torch.bfloat16)
        return Int8Weight(self, codes, scale)

    @classmethod
    def variants(cls) -> "list[Int8]":
        return [cls(), cls(WHOLE_ROW, INT8_INPUTS)]


@dataclass(frozen=True)
class Int8Weight(Weight):
    """A linear layer's 8-bit weight, `w[n, k] = code[n, k] * scale[n, k//g]`.

    codes: int8 [N, K], values -128..127
    scale: float (bf16, fp16 or fp32) [N, K/g]; [N, 1] for whole rows
    """

    spec: Int8
    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        groups = self.codes.view(*self.scale.shape, -1)
        return (groups.float() * self.scale.float().unsqueeze(-1)).view(self.shape).to(dtype)


@dataclass(frozen=True)
class Int8Input:
    """Rounds each token's input to INT8 with its own float32 scale: the largest magnitude becomes 127.

    So does the kernel of vLLM and SGLang; compressed-tensors' own emulation divides by 127.5. Nothing is
    stored or calibrated.
    """

    label: ClassVar[str] = "INT8"
    hardware: ClassVar[str] = "NVIDIA GPUs of compute capability 8.0 or higher"

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return int8 codes [..., K] of x [..., K], and the fp32 scales [..., 1] that multiply them."""
        wide = x.float()
        # Torch multiplies by the reciprocal of a Python number on a GPU, which is another number.
        scale = wide.abs().amax(-1, keepdim=True) / wide.new_full((), MAX_CODE)
        codes = torch.where(scale > 0, wide / scale, 0.0).round_().clamp_(-MAX_CODE, MAX_CODE)
        return codes.to(torch.int8), scale

    def round(self, x: Tensor) -> Tensor:
        codes, scale = self.codes(x)
        return (codes.float() * scale).to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Int8Input":
        return self


PER_TOKEN = Int8Input()

WEIGHT_FORMATS.add(Int8.name, Int8)
