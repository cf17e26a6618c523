"""Products in FP8 and W4A8 by vLLM, torch and DeepGEMM, as layouts that `linear.py` times beside ours.

    vllm_fp8          `cutlass_scaled_mm`, a scale a row and a token: W8A8 as vLLM serves it on Hopper
    vllm_w4a8         `cutlass_w4a8_mm`, INT4 in groups of 128 with group scales in E4M3
    vllm_fp8_block    `cutlass_scaled_mm` with blocks of 128 x 128, inputs in groups of 128
    vllm_fp8_triton   the same by vLLM's kernel in Triton, which it takes if CUTLASS refuses
    torch_fp8         `torch._scaled_mm` with vLLM's rounding, sums in two levels
    torch_fp8_fast    the same with sums of 14 bits, as vLLM's have
    deepgemm_block    DeepGEMM's `fp8_gemm_nt`, if it can be imported, with vLLM's rounding

Each call rounds its inputs first, with vLLM's kernel. The calls follow vLLM 0.26's sources
(`model_executor/kernels/linear/`) and need its compiled kernels, in the folder that is given.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scalegate.layouts.formats.e4m3 import PER_TOKEN
from scalegate.layouts.formats.fp8 import BLOCKS, FP8, FP8Weight, to_blocks
from scalegate.layouts.formats.input_format import dynamic_input
from scalegate.layouts.formats.int4 import Int4, Int4Weight
from scalegate.layouts.formats.weight_format import Weight
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import IS_FOR, PackedWeight, Problem, Serves
from torch import Tensor

FP8_NAME, W4A8_NAME = "vllm_fp8", "vllm_w4a8"
BLOCK_NAME, TRITON_NAME, DEEPGEMM_NAME = "vllm_fp8_block", "vllm_fp8_triton", "deepgemm_block"
TORCH_NAME, FAST_NAME = "torch_fp8", "torch_fp8_fast"
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
    LAYOUTS.add(TORCH_NAME, TorchFP8(kernels, TORCH_NAME, fast=False))
    LAYOUTS.add(FAST_NAME, TorchFP8(kernels, FAST_NAME, fast=True))
    LAYOUTS.add(BLOCK_NAME, Blocks(BLOCK_NAME, partial(cutlass_blocks, kernels)))
    LAYOUTS.add(TRITON_NAME, Blocks(TRITON_NAME, triton_blocks))
    if importlib.util.find_spec("deep_gemm") is not None:
        LAYOUTS.add(DEEPGEMM_NAME, Blocks(DEEPGEMM_NAME, deepgemm_blocks))


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


class TorchFP8(VllmFP8):
    kernel = "_scaled_mm"

    def __init__(self, kernels: Any, name: str, fast: bool):
        super().__init__(kernels)
        self.name = name
        self._fast = fast

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        codes, scale = self._kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        weight, of_rows = packed.tensors["codes"].t(), packed.tensors["scale"].t()
        return torch._scaled_mm(codes, weight, scale, of_rows, out_dtype=x.dtype, use_fast_accum=self._fast)


def cutlass_blocks(kernels: Any, codes: Tensor, scale: Tensor, weight: Tensor, of_blocks: Tensor) -> Tensor:
    return kernels.cutlass_scaled_mm(codes, weight.t(), scale, of_blocks.t(), torch.bfloat16)


def triton_blocks(codes: Tensor, scale: Tensor, weight: Tensor, of_blocks: Tensor) -> Tensor:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    return w8a8_triton_block_scaled_mm(codes, weight, scale, of_blocks, [128, 128], torch.bfloat16)


def deepgemm_blocks(codes: Tensor, scale: Tensor, weight: Tensor, of_blocks: Tensor) -> Tensor:
    import deep_gemm

    y = torch.empty(len(codes), len(weight), dtype=torch.bfloat16, device=codes.device)
    deep_gemm.fp8_gemm_nt((codes, scale), (weight, of_blocks), y, compiled_dims="nk")
    return y


class Blocks:
    """A product of codes [M, K] with scales [M, K/128] and a weight [N, K] with scales [N/128, K/128].

    Scales of inputs are written along M, with rows of a multiple of four for DeepGEMM's loads by TMA.
    """

    kernel = "fp8_blocks"
    rounds_inputs = True
    _serves = Serves((FP8,), "cuda", (torch.bfloat16,), capability=(9, 0), rounds_inputs=True)

    def __init__(self, name: str, multiply: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]):
        self.name = name
        self._multiply = multiply

    def refuses(self, problem: Problem) -> str | None:
        of_blocks = problem.spec == FP8(BLOCKS)
        return self._serves.refuses(problem) or (None if of_blocks else f"{IS_FOR} blocks")

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        if not isinstance(weight, FP8Weight):
            raise TypeError(f"{self.name} packs FP8Weight, not {type(weight).__name__}")
        tensors = {"codes": weight.codes.contiguous(), "scale": to_blocks(weight.scale.float())}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        codes, scale = per_token_group_quant_fp8(
            x, 128, column_major_scales=True, tma_aligned_scales=self.name == DEEPGEMM_NAME, use_ue8m0=False
        )
        return self._multiply(codes, scale, packed.tensors["codes"], packed.tensors["scale"])


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
