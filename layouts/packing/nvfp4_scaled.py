"""NVFP4 weights and inputs on Blackwell: inputs are rounded token by token, then multiplied as codes.

The bytes are the checkpoint's own; the kernel is `kernels/nvfp4/scaled_matmul.py`. The scale of all inputs
comes from the checkpoint, and the layer passes it on (`with_input`). The kernel was compiled but never run,
because we have no Blackwell GPU.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.nvfp4.scaled_matmul import round_to_nvfp4, scaled_matmul
from ...kernels.triton_imports import SCALES_ON_12_1
from ..formats.input_format import InputFormat
from ..formats.nvfp4 import EXAMPLE_SCALE, NVFP4, NVFP4Input, NVFP4Weight
from ..formats.weight_format import Weight
from .layout import IS_FOR, PackedWeight, Problem, Serves
from .trial import trial_refusal

CAPABILITIES = ((10, 0), (12, 0), (12, 1))
SERVES = Serves((NVFP4,), "cuda", (torch.bfloat16, torch.float16), rounds_inputs=True)


class NVFP4Scaled:
    name = "nvfp4_scaled"
    kernel = "nvfp4_scaled_kernel"
    rounds_inputs = True
    run_on = ()
    translated_for = ()

    def refuses(self, problem: Problem) -> str | None:
        refusal = SERVES.refuses(problem) or problem.spec.refuses(problem.n, problem.k)
        if refusal is None and not (isinstance(problem.spec, NVFP4) and problem.spec.activations):
            return f"{IS_FOR} NVFP4 with NVFP4 inputs"
        capability = torch.cuda.get_device_capability(problem.device) if refusal is None else None
        if refusal is None and capability not in CAPABILITIES:
            return "is written for compute capability 10.0, 12.0 and 12.1 (Blackwell)"
        if capability == (12, 1) and not SCALES_ON_12_1:
            return "needs Triton 3.9 on compute capability 12.1"
        return refusal or trial_refusal(self, problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        if not isinstance(weight, NVFP4Weight):
            raise TypeError(f"layout {self.name} packs NVFP4Weight, not {type(weight).__name__}")
        global_scale = weight.global_scale.float()
        tensors = {"codes": weight.codes.contiguous(), "scale": weight.scale, "global_scale": global_scale}
        packed = PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)
        example = NVFP4Input(torch.full_like(global_scale, EXAMPLE_SCALE), divides=False)
        return self.with_input(packed, example)

    def with_input(self, packed: PackedWeight, input_format: InputFormat) -> PackedWeight:
        """Return the packed weight for inputs that are rounded by `input_format`."""
        if not isinstance(input_format, NVFP4Input):
            raise TypeError(f"layout {self.name} rounds inputs to NVFP4, not to {input_format.label}")
        of_weight = packed.tensors["global_scale"]
        of_input = input_format.global_scale.float().to(of_weight.device)
        factor = of_weight / of_input if input_format.divides else of_weight * of_input
        tensors = {**packed.tensors, "input_scale": of_input, "factor": factor.reshape(1)}
        return replace(packed, tensors=tensors, attributes={"divides": int(input_format.divides)})

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors = packed.tensors
        codes, scale = round_to_nvfp4(x, tensors["input_scale"], bool(packed.attributes["divides"]))
        return scaled_matmul(codes, scale, tensors["codes"], tensors["scale"], tensors["factor"], x.dtype)


NVFP4_SCALED = NVFP4Scaled()
