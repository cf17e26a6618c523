"""vLLM's own products in FP8 and W4A8, as layouts that `linear.py` times beside ours.

    vllm_fp8   `cutlass_scaled_mm`, a scale a row and a token: W8A8 as vLLM serves it on Hopper
    vllm_w4a8  `cutlass_w4a8_mm`, INT4 in groups of 128 with group scales in E4M3 (`CutlassW4A8LinearKernel`)

Each call rounds its inputs first, with vLLM's kernel. They were written by vLLM 0.26's sources
(`model_executor/kernels/linear/`), and need its compiled kernels, in the folder that is given.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from scalegate.layouts.formats.e4m3 import PER_TOKEN
from scalegate.layouts.formats.fp8 import BLOCKS, FP8, FP8Weight
from scalegate.layouts.formats.input_format import dynamic_input
from scalegate.layouts.formats.int4 import Int4, Int4Weight
from scalegate.layouts.formats.weight_format import Weight
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import IS_FOR, PackedWeight, Problem, Serves
from torch import Tensor

FP8_NAME, W4A8_NAME = "vllm_fp8", "vllm_w4a8"
SCALE_ERROR = 2.0**-4
"""Of W4A8: its group scales are rounded to three bits of mantissa."""
SIGN_BITS = 0x88
"""Flipping these bits of two codes 0..15 gives two codes -8..7."""
GROUP_SIZE = 128


def register(folder: Path) -> None:
    """Add the layouts, with vLLM's kernels from the packages in `folder`."""
    sys.path.insert(0, str(folder))
    from vllm import _custom_ops as kernels

    LAYOUTS.add(FP8_NAME, VllmFP8(kernels))
    LAYOUTS.add(W4A8_NAME, VllmW4A8(kernels))


class VllmFP8:
    name = FP8_NAME
    kernel = "cutlass_scaled_mm"
    rounds_inputs = True
    _serves = Serves((FP8,), "cuda", (torch.bfloat16,), capability=(9, 0), rounds_inputs=True)

    def __init__(self, kernels: Any):
        self._kernels = kernels

    def refuses(self, problem: Problem) -> str | None:
        is_for_rows = dynamic_input(problem.spec) == PER_TOKEN and problem.spec != FP8(BLOCKS)
        return self._serves.refuses(problem) or (None if is_for_rows else f"{IS_FOR} a scale a row")

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        if not isinstance(weight, FP8Weight):
            raise TypeError(f"{self.name} packs FP8Weight, not {type(weight).__name__}")
        tensors = {"codes": weight.codes.contiguous(), "scale": weight.scale.float().contiguous()}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        codes, scale = self._kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        weight = packed.tensors["codes"].t()
        return self._kernels.cutlass_scaled_mm(codes, weight, scale, packed.tensors["scale"], x.dtype)


class VllmW4A8:
    name = W4A8_NAME
    kernel = "cutlass_w4a8_mm"
    rounds_inputs = True
    _serves = Serves((Int4,), "cuda", (torch.bfloat16,), capability=(9, 0), rounds_inputs=True)

    def __init__(self, kernels: Any):
        self._kernels = kernels

    def refuses(self, problem: Problem) -> str | None:
        refusal, spec = self._serves.refuses(problem), problem.spec
        if refusal is None and spec != Int4(GROUP_SIZE, symmetric=True, activations="fp8"):
            return f"{IS_FOR} INT4 in groups of {GROUP_SIZE} with FP8 inputs"
        return refusal

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        if not isinstance(weight, Int4Weight):
            raise TypeError(f"{self.name} packs Int4Weight, not {type(weight).__name__}")
        words = (weight.codes ^ SIGN_BITS).contiguous().view(torch.int32)
        scale, of_rows = self._kernels.scaled_fp8_quant(
            weight.scale.contiguous(), use_per_token_if_dynamic=True
        )
        # As `convert_bf16_scales_to_fp8`: an eighth, since codes times scales are E4M3 there.
        eighths = (scale.float() / 8).to(torch.float8_e4m3fn)
        tensors = {
            "words": self._kernels.cutlass_encode_and_reorder_int4b(words.t()),
            "scale": self._kernels.cutlass_pack_scale_fp8(eighths.t().contiguous()),
            "of_rows": (of_rows * 8).contiguous(),
        }
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        codes, scale = self._kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        words, of_groups, of_rows = packed.tensors.values()
        return self._kernels.cutlass_w4a8_mm(codes, words, of_groups, GROUP_SIZE, of_rows, scale)
