"""Our own layouts for Hopper: weights of any format in the order of the tensor cores' registers.

This file has the code that all formats share. Each format has a `Packing` in a file beside this one, and its
byte layout and decoder in `kernels/`. The CPU and other GPUs have layouts of their own.

    NAME            stream-K; tile and split follow from the bucket of M and the shape
    NAME_invariant  split-K; the order of summation is the same for every M, so a row's bits do not depend on
                    other rows
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES, BatchInvariance
from ...kernels.hopper import gemm
from ...kernels.hopper.packed_operand import SEMAPHORES, PackedOperand
from ..formats.weight_format import Weight
from .layout import PackedWeight, Problem, Serves
from .trial import trial_refusal

HOPPER = (9, 0)


class Packing(Protocol):
    """How a format's weights become the Hopper kernels' operands."""

    @property
    def format(self) -> type:
        """The class of the format's spec."""
        ...

    @property
    def kernel_prefix(self) -> str:
        """The name of the format's decoder in the kernels."""
        ...

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of activations that the format's decoder supports."""
        ...

    def refuses(self, problem: Problem) -> str | None:
        """Return None if the format's parameters are served, otherwise the reason in a few words."""
        ...

    def pack(self, weight: Weight, dtype: torch.dtype) -> tuple[Mapping[str, Tensor], Mapping[str, int]]:
        """Return the tensors and the attributes of a `PackedWeight`."""
        ...

    def operand(self, packed: PackedWeight) -> PackedOperand: ...


class HopperLayout:
    """Multiplies by the Hopper kernels on one format's packed bytes."""

    run_on = (HOPPER,)
    translated_for = ()

    def __init__(self, name: str, packing: Packing, batch_invariant: bool):
        self.name = name
        self.packing = packing
        self.batch_invariant = batch_invariant
        self.kernel = f"{packing.kernel_prefix}_{'invariant' if batch_invariant else 'stream_k'}_kernel"

    def refuses(self, problem: Problem) -> str | None:
        modes: tuple[BatchInvariance, ...] = INVARIANCE_MODES if self.batch_invariant else ("tuned",)
        packing = self.packing
        serves = Serves((packing.format,), "cuda", packing.dtypes, invariance_modes=modes, capability=HOPPER)
        refusal = serves.refuses(problem) or packing.refuses(problem)
        if refusal is None and torch.cuda.get_device_capability(problem.device) != HOPPER:
            return "is written for compute capability 9.0 (Hopper)"
        return refusal or trial_refusal(self, problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        tensors, attributes = self.packing.pack(weight, dtype)
        device = next(iter(tensors.values())).device
        semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device=device)
        tensors = {**tensors, "semaphores": semaphores}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, tensors, attributes)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return self.multiply(x, self.packing.operand(packed), packed.shape[0])

    def multiply(self, x: Tensor, weight: PackedOperand, n: int) -> Tensor:
        """Compute what `matmul` does by an operand that was made of a packed weight with `n` rows."""
        x = x.contiguous()
        if x.data_ptr() % 16:
            x = x.clone()
        return gemm.matmul(x, weight, n, self.batch_invariant)
