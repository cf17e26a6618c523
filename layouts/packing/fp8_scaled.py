"""FP8, and INT8 with INT8 inputs, on GPUs that multiply them: inputs are rounded, token by token or by one
scale, then multiplied as codes.

    fp8_scaled            our kernels with few rows (on Hopper `kernels/fp8/hopper_matmul.py`, elsewhere
                          `kernels/fp8/matmul.py`), torch's with many
    fp8_scaled_invariant  `kernels/fp8/matmul.py` alone: sums have one order at any number of rows
    int8_inputs           the same kernel, whose sums of INT8 are integers

The bytes are the checkpoint's own. The CPU emulates FP8 instead (`emulated.py`), and multiplies INT8 by
`peers/int_mm.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES, BatchInvariance
from ...kernels.fp8 import hopper_matmul
from ...kernels.fp8.matmul import matmul
from ...kernels.fp8.round_rows import round_rows
from ...kernels.fp8.tiles import semaphores_of
from ...kernels.hopper.packed_operand import SEMAPHORES
from ..formats.e4m3 import BLOCK, PER_TOKEN, E4M3StaticInput
from ..formats.fp8 import FP8, FP8Weight
from ..formats.input_format import InputFormat, dynamic_input, example_input
from ..formats.int8 import PER_TOKEN as INT8_PER_TOKEN
from ..formats.int8 import Int8, Int8Weight
from ..formats.weight_format import Weight, WeightFormat
from .layout import IS_FOR, PackedWeight, Problem, Serves
from .peers.int_mm import MOST_COLUMNS
from .trial import trial_refusal

CAPABILITY, INT8_CAPABILITY = (8, 9), (8, 0)
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
            "semaphores": torch.zeros(
                max(semaphores_of(n), SEMAPHORES), dtype=torch.int32, device=weight.codes.device
            ),
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
        in_blocks = packed.tensors["scale"].shape[0] > 1
        codes, scales = round_rows(x, in_blocks, packed.tensors.get("input_scale"))
        return self.matmul_rounded(codes, scales, packed, x.dtype)

    def takes_rounded(self, spec: WeightFormat) -> bool:
        return dynamic_input(spec) == PER_TOKEN

    def matmul_rounded(
        self, codes: Tensor, scales: Tensor, packed: PackedWeight, dtype: torch.dtype
    ) -> Tensor:
        weight, scale, semaphores = (packed.tensors[name] for name in ("codes", "scale", "semaphores"))
        in_blocks, (m, k) = scale.shape[0] > 1, codes.shape
        if self._scaled_mm and not in_blocks and hopper_matmul.serves(m, len(weight), k, codes.device):
            return hopper_matmul.matmul(codes, scales[0], weight, scale, semaphores, dtype)
        many = packed.tensors.get("blocks") if in_blocks else scale
        if self._scaled_mm and many is not None and _suits_scaled_mm(m, weight, dtype):
            return torch._scaled_mm(
                codes, weight.t(), scales.t(), many.t() if in_blocks else many, out_dtype=dtype
            )
        return matmul(codes, scales, weight, scale, semaphores, dtype)


def _suits_scaled_mm(m: int, weight: Tensor, dtype: torch.dtype) -> bool:
    """Say whether torch's product is used for m rows and a weight [N, K]: it needs bf16, many rows and
    certain sizes.
    """
    if m < SCALED_MM_FROM or dtype != torch.bfloat16:
        return False
    return all(size % SCALED_MM_MULTIPLE == 0 for size in weight.shape)


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


class Int8Inputs:
    """Sums of a split of K are exact in int32, and splits are added in the order of K, so the bits of a row
    depend neither on the rows beside it nor on the tile.
    """

    name = "int8_inputs"
    kernel = "int8_inputs_kernel"
    rounds_inputs = True
    run_on = ((9, 0),)
    translated_for = ((8, 0), (8, 9))
    _serves = Serves(
        (Int8,),
        "cuda",
        (torch.bfloat16, torch.float16),
        invariance_modes=INVARIANCE_MODES,
        capability=INT8_CAPABILITY,
        rounds_inputs=True,
    )

    def refuses(self, problem: Problem) -> str | None:
        refusal = self._serves.refuses(problem)
        if refusal is None and dynamic_input(problem.spec) != INT8_PER_TOKEN:
            return f"{IS_FOR} INT8 with INT8 inputs"
        if refusal is None and problem.k > MOST_COLUMNS:
            return f"sums at most {MOST_COLUMNS} columns in int32"
        return refusal or trial_refusal(self, problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        if not isinstance(weight, Int8Weight):
            raise TypeError(f"layout {self.name} packs Int8Weight, not {type(weight).__name__}")
        n = weight.shape[0]
        tensors = {
            "codes": weight.codes.contiguous(),
            "scale": weight.scale.float().reshape(1, n),
            "semaphores": torch.zeros(semaphores_of(n), dtype=torch.int32, device=weight.codes.device),
        }
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        codes, scales = round_rows(x, dtype=torch.int8)
        weight, scale, semaphores = packed.tensors.values()
        return matmul(codes, scales, weight, scale, semaphores, x.dtype)


FP8_SCALED = FP8Scaled("fp8_scaled", ["tuned"], scaled_mm=True)
FP8_SCALED_INVARIANT = FP8Scaled("fp8_scaled_invariant", INVARIANCE_MODES, scaled_mm=False)
INT8_INPUTS = Int8Inputs()
