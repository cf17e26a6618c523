"""Our own products by quantized weights on a CPU (`kernels/cpu/`): four or eight bits a weight are read, and
nothing but y is rounded.

    cpu_int4_tiles     INT4
    cpu_nvfp4_tiles    NVFP4, with 5 bits a weight
    cpu_iq2_xxs_tiles  IQ2_XXS, whose look-ups are done while packing: 5 bits a weight
    cpu_int8_tiles     INT8
    cpu_int4_amx, cpu_nvfp4_amx, cpu_iq2_xxs_amx, cpu_int8_amx
                       the same bytes; where the CPU has AMX, it multiplies three rows of x and more,
                       and many rows by weights that are decoded, and rounded to bfloat16, for each product

On an EPYC with AVX-512 BF16, INT4 is at least as fast as the unquantized product at every M up to 128
(`tests/bench/results/layouts/int4_cpu.md`; the others are beside it). A row's bits do not depend on the rows
beside it, except with AMX, so the other layouts serve batch invariance too. The layouts of this file are
chosen by a measurement only: numba takes seconds to compile a kernel for the first time.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES
from ...kernels.cpu import code_packing
from ...kernels.cpu.calls import Call
from ...kernels.cpu.code_packing import BLOCK, Codes, PackedCodes, Scales
from ...kernels.iq2_xxs.grid import MAGNITUDES, grid, signs
from ..formats import iq2_xxs, nvfp4
from ..formats.int4 import Int4, Int4Weight, unpack_nibbles
from ..formats.int8 import Int8, Int8Weight
from ..formats.iq2_xxs import IQ2XXS, IQ2XXSWeight
from ..formats.nvfp4 import NVFP4, NVFP4Weight
from ..formats.weight_format import Weight
from .layout import IS_FOR, MANY_ROWS, PackedWeight, Problem, Serves

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_AMX = f"{IS_FOR} CPUs with AMX"
INT8_GROUP = 128
"""Columns of a row that are added up before their scale, where a whole row shares one."""


@dataclass(frozen=True)
class CpuTiles:
    """Any group size is served; activations that the CPU cannot multiply as they are become float32."""

    name: str
    format: type
    codes: Codes
    arrange: Callable[[Any], tuple[PackedCodes, Scales, int]]
    """Returns the packed codes of a weight, the form of their scales and the group size."""
    amx: bool = False

    @property
    def kernel(self) -> str:
        return "amx.multiply_band" if self.amx else "coded_tile.multiply"

    def refuses(self, problem: Problem) -> str | None:
        if not self.amx:
            return Serves((self.format,), "cpu", DTYPES, invariance_modes=INVARIANCE_MODES).refuses(problem)
        # What it is for comes first: neither shape nor dtype changes that.
        refusal = Serves((self.format,), "cpu").refuses(problem) or _refuses_without_amx()
        refusal = refusal or Serves((self.format,), "cpu", (torch.bfloat16,)).refuses(problem)
        return refusal or _refuses_for_tiles(self.codes, problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        packed, form, group_size = self.arrange(weight)
        # Compiled here, so that nothing is in the first product.
        self._kernel(dtype, form)
        attributes = {"group_size": group_size, "scales": int(form)}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, packed._asdict(), attributes)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return self.product_by(packed)(x)

    def product_by(self, packed: PackedWeight) -> Callable[[Tensor], Tensor]:
        dtype, (n, k) = packed.dtype, packed.shape
        group_size, scales = packed.attributes["group_size"], packed.attributes["scales"]
        coded_matmul, kernel = self._kernel(dtype, scales)
        multiply = coded_matmul.product_by(_codes(packed), k, group_size, kernel)
        if self.amx:
            multiply = _with_many_rows(multiply, _codes(packed), k, group_size, self.codes, Scales(scales))
        if kernel.dtype is dtype and n % BLOCK == 0:
            return multiply
        return lambda x: multiply(x.to(kernel.dtype))[:, :n].to(dtype).contiguous()

    def call_by(self, packed: PackedWeight, x: int, y: int) -> Call | None:
        coded_matmul, kernel = self._kernel(packed.dtype, packed.attributes["scales"])
        if kernel.dtype is not packed.dtype or packed.shape[0] % BLOCK:
            return None
        k, group_size = packed.shape[1], packed.attributes["group_size"]
        call: Call = coded_matmul.product_call(_codes(packed), k, group_size, kernel, x, y)
        return call

    def _kernel(self, dtype: torch.dtype, scales: int) -> tuple[Any, Any]:
        return _kernel(dtype, int(self.codes), int(scales), self.amx)


def _refuses_without_amx() -> str | None:
    if not torch.cpu._init_amx():
        return NO_AMX
    # numba takes half a second to import, so only where the CPU has AMX.
    from ...kernels.cpu.coded_matmul import has_amx

    return None if has_amx() else NO_AMX


def _refuses_for_tiles(codes: Codes, problem: Problem) -> str | None:
    from ...kernels.cpu.amx import columns_of_a_tile
    from ...kernels.cpu.coded_matmul import PANEL_COLUMNS

    at_once = columns_of_a_tile(codes)
    group_size = problem.spec.group_size if isinstance(problem.spec, Int4) else at_once
    if group_size % at_once or group_size > PANEL_COLUMNS:
        return f"takes groups of a multiple of {at_once} columns, of {PANEL_COLUMNS} at most"
    if problem.k % at_once:
        return f"needs K to be a multiple of {at_once}"
    return None


def _with_many_rows(
    multiply: Callable[[Tensor], Tensor],
    packed: PackedCodes,
    k: int,
    group_size: int,
    codes: Codes,
    scales: Scales,
) -> Callable[[Tensor], Tensor]:
    """Return `multiply`, but let oneDNN multiply many rows by weights that are decoded for each product."""
    from ...kernels.cpu import onednn_blocks

    if not onednn_blocks.takes(k):
        return multiply
    multiply_many = onednn_blocks.product_by(packed, k, group_size, codes, scales)
    return lambda x: multiply_many(x) if x.shape[0] >= MANY_ROWS else multiply(x)


def _codes(packed: PackedWeight) -> PackedCodes:
    return PackedCodes(packed.tensors["codes"], packed.tensors["scales"], packed.tensors["factor"])


@functools.cache
def _kernel(dtype: torch.dtype, codes: int, scales: int, amx: bool) -> tuple[Any, Any]:
    """Return the module of the products, and the compiled kernel for activations of `dtype`.

    The module is imported only here, because numba takes half a second to import.
    """
    from ...kernels.cpu import coded_matmul, coded_tile

    instructions = coded_tile.Instructions.AMX if amx else coded_matmul.instructions_for(dtype)
    return coded_matmul, coded_matmul.kernel(instructions, Codes(codes), Scales(scales))


def _arrange_int4(weight: Int4Weight) -> tuple[PackedCodes, Scales, int]:
    packed, form = code_packing.pack_int4(unpack_nibbles(weight.codes), weight.scale, weight.zero_point)
    return packed, form, weight.spec.group_size


def _arrange_nvfp4(weight: NVFP4Weight) -> tuple[PackedCodes, Scales, int]:
    packed = code_packing.pack_e2m1(unpack_nibbles(weight.codes), weight.scale, weight.global_scale)
    return packed, Scales.PAIRS, nvfp4.GROUP_SIZE


def _arrange_iq2_xxs(weight: IQ2XXSWeight) -> tuple[PackedCodes, Scales, int]:
    device = weight.words.device
    levels = torch.bucketize(grid(device), torch.tensor(MAGNITUDES[:-1], device=device).float())
    of_entries = levels.to(torch.uint8)[weight.indices().int()].view(weight.shape)
    negative = (signs(device) < 0)[weight.sign_patterns().int()].view(weight.shape)
    packed = code_packing.pack_iq2_xxs(of_entries, negative, weight.scales_of_blocks())
    return packed, Scales.FLOAT32, iq2_xxs.BLOCK


def _arrange_int8(weight: Int8Weight) -> tuple[PackedCodes, Scales, int]:
    scale, group_size = weight.scale, weight.spec.group_size
    if not weight.spec.has_groups:
        group_size = INT8_GROUP
        scale = scale.expand(-1, -(-weight.shape[1] // group_size))
    return code_packing.pack_int8(weight.codes, scale), Scales.FLOAT32, group_size


CPU_TILES = (
    CpuTiles("cpu_int4_tiles", Int4, Codes.INT4, _arrange_int4),
    CpuTiles("cpu_nvfp4_tiles", NVFP4, Codes.E2M1, _arrange_nvfp4),
    CpuTiles("cpu_iq2_xxs_tiles", IQ2XXS, Codes.IQ2_XXS, _arrange_iq2_xxs),
    CpuTiles("cpu_int8_tiles", Int8, Codes.INT8, _arrange_int8),
)
CPU_AMX = tuple(replace(tiles, name=tiles.name.replace("_tiles", "_amx"), amx=True) for tiles in CPU_TILES)
