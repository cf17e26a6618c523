"""Our own INT4 product on a CPU (`kernels/cpu/`): four bits a weight are read, and nothing but y is rounded.

On an EPYC with AVX-512 BF16 it is at least as fast as the unquantized product at every M up to 128
(`tests/bench/results/layouts/int4_cpu.md`). A row's bits do not depend on the rows beside it, so it serves
batch invariance too. Chosen by a measurement only: numba takes seconds to compile it for the first time.
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES
from ...kernels.cpu import int4_packing
from ...kernels.cpu.int4_packing import PackedInt4, holds_float32
from ..formats.int4 import Int4, unpack_nibbles
from ..formats.weight_format import Weight
from .int4_affine import require_int4
from .layout import PackedWeight, Problem, Serves

SERVES = Serves(
    (Int4,), "cpu", (torch.bfloat16, torch.float16, torch.float32), invariance_modes=INVARIANCE_MODES
)


@dataclass(frozen=True)
class CpuInt4Tiles:
    """Any group size; activations that the CPU cannot multiply as they are become float32."""

    name: str = "cpu_int4_tiles"
    kernel: str = "int4_tile.multiply"

    def refuses(self, problem: Problem) -> str | None:
        return SERVES.refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        weight = require_int4(weight, self.name)
        packed = int4_packing.pack(unpack_nibbles(weight.codes), weight.scale, weight.zero_point)
        # Compiled here, so that nothing is in the first product.
        instructions = _kernels().instructions_for(dtype)
        _kernels().kernel(instructions, holds_float32(packed.scales))
        attributes = {"group_size": weight.spec.group_size}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, packed._asdict(), attributes)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        kernels, tensors, n = _kernels(), packed.tensors, packed.shape[0]
        operand = PackedInt4(tensors["codes"], tensors["scales"])
        instructions = kernels.instructions_for(packed.dtype)
        x = x.to(kernels.dtype_of(instructions))
        y = kernels.matmul(x, operand, packed.attributes["group_size"], instructions)
        if y.shape[1] != n:
            y = y[:, :n]
        return y if y.dtype is packed.dtype else y.to(packed.dtype)


@functools.cache
def _kernels() -> ModuleType:
    """Imported only where they are used: numba takes half a second to import."""
    from ...kernels.cpu import int4_matmul

    return int4_matmul


CPU_INT4_TILES = CpuInt4Tiles()
