"""The batch-invariant product of an unquantized weight on a GPU, by our own kernel.

The CPU's product is in `fixed_rows.py`, the product without batch invariance in `torch_linear.py`.
"""

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES
from ...kernels.invariant_matmul import invariant_matmul, semaphores_of
from ..formats.unquantized import Unquantized
from ..formats.weight_format import Weight
from .layout import FOR_INVARIANCE_ONLY, PackedWeight, Problem, Serves
from .trial import trial_refusal

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class InvariantLinear:
    """Holds the weight [N, K], not copied, and semaphores for the splits along K."""

    name = "invariant_linear"
    kernel = "invariant_matmul_kernel"
    run_on = ((9, 0),)
    translated_for = ()

    def refuses(self, problem: Problem) -> str | None:
        if problem.batch_invariance == "tuned":
            return FOR_INVARIANCE_ONLY
        serves = Serves((Unquantized,), "cuda", DTYPES, invariance_modes=INVARIANCE_MODES, capability=(8, 0))
        return serves.refuses(problem) or trial_refusal(self, problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        values = weight.dequantize(dtype).contiguous()
        semaphores = torch.zeros(semaphores_of(weight.shape[0]), dtype=torch.int32, device=values.device)
        tensors = {"weight": values, "semaphores": semaphores}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors = packed.tensors
        return invariant_matmul(x.contiguous(), tensors["weight"], tensors["semaphores"])
