"""INT4 with FP8 activations (W4A8) on Hopper: inputs rounded token by token, weights decoded to E4M3.

E4M3 holds every code exactly, and group scales multiply sums. Only three things are rounded: the inputs, as
the format requires; sums of at most 128 products, for which Hopper has 14 bits; and y. Other GPUs emulate the
format (`emulated.py`).
"""

import torch
from torch import Tensor

from ...kernels.fp8.round_rows import round_rows
from ...kernels.hopper.packed_operand import SEMAPHORES
from ...kernels.int4 import e4m3_packing
from ...kernels.int4.e4m3_matmul import matmul
from ...kernels.int4.packing import MAX_GROUP
from ..formats.e4m3 import PER_TOKEN
from ..formats.input_format import dynamic_input
from ..formats.int4 import Int4, unpack_nibbles
from ..formats.weight_format import Weight, WeightFormat
from .hopper import HOPPER
from .int4_affine import int4_of, require_int4
from .layout import IS_FOR, PackedWeight, Problem, Serves
from .swap_ab import refuses_groups
from .trial import trial_refusal


class Int4FP8:
    name = "int4_fp8"
    kernel = "int4_fp8_stream_k_kernel"
    rounds_inputs = True
    run_on = (HOPPER,)
    translated_for = ()
    _serves = Serves((Int4,), "cuda", (torch.bfloat16, torch.float16), capability=HOPPER, rounds_inputs=True)

    def refuses(self, problem: Problem) -> str | None:
        refusal = self._serves.refuses(problem)
        if refusal is None and dynamic_input(problem.spec) != PER_TOKEN:
            return f"{IS_FOR} INT4 with FP8 inputs"
        refusal = refusal or refuses_groups(int4_of(problem).group_size)
        if refusal is None and torch.cuda.get_device_capability(problem.device) != HOPPER:
            return "is written for compute capability 9.0 (Hopper)"
        return refusal or trial_refusal(self, problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        weight = require_int4(weight, self.name)
        group_size = weight.spec.group_size
        tensors = {
            "words": e4m3_packing.pack_words(unpack_nibbles(weight.codes)),
            "scale_words": e4m3_packing.pack_scales(weight.scale, group_size),
            "semaphores": torch.zeros(SEMAPHORES, dtype=torch.int32, device=weight.codes.device),
        }
        return PackedWeight(
            self.name, weight.spec, weight.shape, dtype, tensors, {"group_size": min(group_size, MAX_GROUP)}
        )

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return self.matmul_rounded(*round_rows(x), packed, x.dtype)

    def takes_rounded(self, spec: WeightFormat) -> bool:
        return dynamic_input(spec) == PER_TOKEN

    def matmul_rounded(
        self, codes: Tensor, scales: Tensor, packed: PackedWeight, dtype: torch.dtype
    ) -> Tensor:
        words, scale_words, semaphores = packed.tensors.values()
        group_size = packed.attributes["group_size"]
        return matmul(codes, scales[0], words, scale_words, semaphores, packed.shape[0], group_size, dtype)


INT4_FP8 = Int4FP8()
