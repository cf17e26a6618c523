"""Our own INT4 product on a CPU (`kernels/cpu/`): four bits a weight are read, and nothing but y is rounded.

On an EPYC with AVX-512 BF16 it is at least as fast as the unquantized product at every M up to 128
(`tests/bench/results/layouts/int4_cpu.md`). A row's bits do not depend on the rows beside it, so this layout
serves batch invariance too. The layout is chosen by a measurement only: numba takes seconds to compile the
kernel for the first time.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES
from ...kernels.cpu import int4_packing
from ...kernels.cpu.int4_packing import holds_float32
from ..formats.int4 import Int4, unpack_nibbles
from ..formats.weight_format import Weight
from .int4_affine import require_int4
from .layout import PackedWeight, Problem, Serves

SERVES = Serves(
    (Int4,), "cpu", (torch.bfloat16, torch.float16, torch.float32), invariance_modes=INVARIANCE_MODES
)


@dataclass(frozen=True)
class CpuInt4Tiles:
    """Any group size is served; activations that the CPU cannot multiply as they are become float32."""

    name: str = "cpu_int4_tiles"
    kernel: str = "int4_tile.multiply"

    def refuses(self, problem: Problem) -> str | None:
        return SERVES.refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        weight = require_int4(weight, self.name)
        packed = int4_packing.pack(unpack_nibbles(weight.codes), weight.scale, weight.zero_point)
        wide = int(holds_float32(packed.scales))
        # Compiled here, so that nothing is in the first product.
        _kernel(dtype, wide)
        attributes = {"group_size": weight.spec.group_size, "wide": wide}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, packed._asdict(), attributes)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        tensors, attributes, dtype = packed.tensors, packed.attributes, packed.dtype
        multiply, kernel = _kernel(dtype, attributes["wide"])
        if kernel.dtype is not dtype:
            x = x.to(kernel.dtype)
        y = multiply(x, tensors["codes"], tensors["scales"], attributes["group_size"], kernel)
        if y.shape[1] != packed.shape[0]:
            y = y[:, : packed.shape[0]]
        return y if kernel.dtype is dtype else y.to(dtype)


@functools.cache
def _kernel(dtype: torch.dtype, wide: int) -> tuple[Callable[..., Tensor], Any]:
    """Return the product's function and the compiled kernel that it takes, for activations of `dtype`.

    The kernel's modules are imported only here, because numba takes half a second to import.
    """
    from ...kernels.cpu.int4_matmul import instructions_for, kernel, matmul

    return matmul, kernel(instructions_for(dtype), bool(wide))


CPU_INT4_TILES = CpuInt4Tiles()
