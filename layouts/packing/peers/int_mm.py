"""INT8 weights and inputs on a CPU, through torch's product of integers (oneDNN, with VNNI instructions).

Inputs are rounded token by token to codes, as the format says. The sums of products of codes are exact in
int32, in whichever order they are added, so a row's bits depend on nothing beside it. They are then
multiplied by the scales of token and row in float32.
"""

import torch
from torch import Tensor

from ....base.batch_invariance import INVARIANCE_MODES
from ...formats.input_format import dynamic_input
from ...formats.int8 import PER_TOKEN, Int8, Int8Weight
from ...formats.weight_format import Weight
from ..layout import IS_FOR, PackedWeight, Problem, Serves

MOST_COLUMNS = 1 << 17
"""So many products sum to an int32: inputs have no code of -128, and 2^17 * 127 * 128 is below 2^31."""


class CpuInt8Inputs:
    name = "cpu_int8_inputs"
    kernel = "torch._int_mm"
    rounds_inputs = True
    _serves = Serves((Int8,), "cpu", invariance_modes=INVARIANCE_MODES, rounds_inputs=True)

    def refuses(self, problem: Problem) -> str | None:
        refusal = self._serves.refuses(problem)
        if refusal is None and dynamic_input(problem.spec) != PER_TOKEN:
            return f"{IS_FOR} INT8 with INT8 inputs"
        if refusal is None and problem.k > MOST_COLUMNS:
            return f"sums at most {MOST_COLUMNS} columns in int32"
        return refusal

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        if not isinstance(weight, Int8Weight):
            raise TypeError(f"layout {self.name} packs Int8Weight, not {type(weight).__name__}")
        tensors = {"codes": weight.codes.contiguous(), "scale": weight.scale.float().reshape(-1)}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        codes, scale = PER_TOKEN.codes(x)
        sums = torch._int_mm(codes, packed.tensors["codes"].t())
        return (sums * scale * packed.tensors["scale"]).to(x.dtype)


CPU_INT8_INPUTS = CpuInt8Inputs()
