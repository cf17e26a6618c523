"""Products of formats that round inputs while serving (FP8, INT4 with FP8 inputs), in float32.

The input is rounded as the format requires, with scales in float32, and multiplied by the weight in float32.
Hardware that multiplies FP8 computes the same results, except for the order of its sums. Emulation reproduces
the formats' quality, not their speed. All other layouts receive inputs that have already been rounded, in 16
bits.

    emulated      the weight as stored, dequantized again for every product; on any device
    cpu_emulated  the weight dequantized once, into twice the memory of bf16; on a CPU
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.input_format import dynamic_input
from ..formats.weight_format import Weight, weight_of
from .layout import IS_FOR, PackedWeight, Problem, Serves


class EmulatedProduct:
    kernel = "F.linear in float32"
    rounds_inputs = True
    emulates = True

    def __init__(self, name: str, device: str | None, once: bool):
        self.name = name
        self.once = once
        self._serves = Serves(device=device, rounds_inputs=True)

    def refuses(self, problem: Problem) -> str | None:
        if dynamic_input(problem.spec) is None:
            return f"{IS_FOR} formats that round inputs as they come"
        return self._serves.refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        tensors = {"weight": weight.dequantize(torch.float32)} if self.once else weight.tensors()
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        if self.once:
            weight = packed.tensors["weight"]
        else:
            weight = weight_of(packed.spec, packed.tensors).dequantize(torch.float32)
        return functional.linear(rounded_in_float32(x, packed), weight).to(x.dtype)


def rounded_in_float32(x: Tensor, packed: PackedWeight) -> Tensor:
    """Return x [M, K] in fp32, rounded as the weight's spec says."""
    input_format = dynamic_input(packed.spec)
    if input_format is None:
        raise TypeError(f"{packed.spec.label} does not round inputs as they come")
    return input_format.round(x.float())


CPU_EMULATED = EmulatedProduct("cpu_emulated", "cpu", once=True)
EMULATED = EmulatedProduct("emulated", None, once=False)
