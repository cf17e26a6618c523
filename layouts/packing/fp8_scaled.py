"""FP8 on GPUs that multiply E4M3: inputs are rounded, token by token or by one scale, then multiplied as
codes.

    fp8_scaled            our kernel (`kernels/fp8/matmul.py`) with few rows, torch's with many
    fp8_scaled_invariant  our kernel alone: sums have one order at any number of rows

The bytes are the checkpoint's own. The CPU emulates FP8 instead (`emulated.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES, BatchInvariance
from ...kernels.fp8.matmul import matmul
from ...kernels.fp8.round_rows import round_rows
from ...kernels.fp8.tiles import semaphores_of
from ..formats.e4m3 import BLOCK, E4M3StaticInput
from ..formats.fp8 import FP8, FP8Weight
from ..formats.input_format import InputFormat, example_input
from ..formats.weight_format import Weight
from .layout import PackedWeight, Problem, Serves
from .trial import trial_refusal

CAPABILITY = (8, 9)
SCALED_MM_FROM = 65
"""Rows of x from which torch's product is faster on Hopper."""
SCALED_MM_MULTIPLE = 16
"""Of N and K, for torch's product."""


class FP8Scaled:
    kernel = "fp8_kernel"
    rounds_inputs = True
    run_on = ((9, 0),)
    translated_for = ()

    def __init__(self, name: str, invariance_modes: Sequence[BatchInvariance], scaled_mm: bool):
        self.name = name
        self._scaled_mm = scaled_mm
        self._serves = Serves(
            (FP8,),
            "cuda",
            (torch.bfloat16, torch.float16),
            invariance_modes=tuple(invariance_modes),
            capability=CAPABILITY,
            rounds_inputs=True,
        )

    def refuses(self, problem: Problem) -> str | None:
        refusal = self._serves.refuses(problem) or problem.spec.refuses(problem.n, problem.k)
        return refusal or trial_refusal(self, problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        if not isinstance(weight, FP8Weight):
            raise TypeError(f"layout {self.name} packs FP8Weight, not {type(weight).__name__}")
        n = weight.shape[0]
        scale = weight.scale.float()
        tensors = {
            "codes": weight.codes.contiguous(),
            "scale": (scale.t() if scale.dim() else scale.expand(1, n)).contiguous(),
            "semaphores": torch.zeros(semaphores_of(n), dtype=torch.int32, device=weight.codes.device),
        }
        blocks = _blocks_of(tensors["scale"]) if self._scaled_mm else None
        if blocks is not None:
            tensors["blocks"] = blocks
        packed = PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)
        example = example_input(weight.spec)
        return packed if example is None else self.with_input(packed, example)

    def with_input(self, packed: PackedWeight, input_format: InputFormat) -> PackedWeight:
        """Return the packed weight for inputs that are rounded by `input_format`, with their scale if it is
        static.
        """
        if not isinstance(input_format, E4M3StaticInput):
            return packed
        of_input = input_format.scale.float().to(packed.tensors["codes"].device).reshape(1)
        return replace(packed, tensors={**packed.tensors, "input_scale": of_input})

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        codes, scale, semaphores = (packed.tensors[name] for name in ("codes", "scale", "semaphores"))
        in_blocks = scale.shape[0] > 1
        inputs, input_scale = round_rows(x, in_blocks, packed.tensors.get("input_scale"))
        many = packed.tensors.get("blocks") if in_blocks else scale
        if self._scaled_mm and many is not None and _suits_scaled_mm(x, codes):
            return torch._scaled_mm(
                inputs, codes.t(), input_scale.t(), many.t() if in_blocks else many, out_dtype=x.dtype
            )
        return matmul(inputs, input_scale, codes, scale, semaphores, x.dtype)


def _suits_scaled_mm(x: Tensor, codes: Tensor) -> bool:
    """Say whether torch's product is used for x [M, K] and codes [N, K]: it needs bf16, many rows and certain
    sizes.
    """
    if x.shape[0] < SCALED_MM_FROM or x.dtype != torch.bfloat16:
        return False
    return all(size % SCALED_MM_MULTIPLE == 0 for size in codes.shape)


def _blocks_of(scale: Tensor) -> Tensor | None:
    """Return fp32 [N/128, K/128] of a scale [K/128, N] for torch's product; None if blocks are not of 128
    rows.

    Rows of a merged weight begin anywhere, and torch asks for a multiple of four blocks along K.
    """
    groups, n = scale.shape
    if groups == 1 or groups % 4 or n % BLOCK:
        return None
    blocks = scale[:, ::BLOCK]
    if not torch.equal(blocks.repeat_interleave(BLOCK, 1), scale):
        return None
    return blocks.t().contiguous()


FP8_SCALED = FP8Scaled("fp8_scaled", ["tuned"], scaled_mm=True)
FP8_SCALED_INVARIANT = FP8Scaled("fp8_scaled_invariant", INVARIANCE_MODES, scaled_mm=False)
