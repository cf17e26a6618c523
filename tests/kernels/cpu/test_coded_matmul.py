"""The CPU's products by coded weights beside float64, with each kind of instructions that it has."""

import sys
from typing import NamedTuple

import pytest
import torch
from scalegate.kernels.cpu import coded_matmul
from scalegate.kernels.cpu.amx import columns_of_a_tile
from scalegate.kernels.cpu.code_packing import PackedCodes, Scales, dequantize, padded_rows
from scalegate.kernels.cpu.coded_matmul import (
    AMX_PANEL_ROWS,
    PANEL_COLUMNS,
    PANEL_ROWS,
    has_amx,
    instructions_for,
    kernel,
)
from scalegate.kernels.cpu.coded_tile import Instructions
from scalegate.kernels.cpu.openmp import gomp_parallel
from scalegate.layouts.formats.int4 import Int4, Int4Weight
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import Weight, WeightFormat
from scalegate.layouts.packing import cpu_tiles
from scalegate.layouts.packing.cpu_tiles import CPU_TILES, CpuTiles
from scalegate.tests.rounding_bounds import product_bound, rounded, summed

CPU = torch.device("cpu")
N = 200
FORMATS = [
    *((Int4(size), 512) for size in (16, 128)),
    (NVFP4(), 176),
    (IQ2XXS(), 512),
    *((Int8(size), k) for size, k in ((32, 96), (128, 512), (WHOLE_ROW, 172))),
]
"""With K: an odd number of groups of NVFP4, and of INT8 a last group of a row that is shorter than others."""


def random_weight(spec: WeightFormat, n: int = N, k: int = 512) -> Weight:
    torch.manual_seed(7)
    return spec.random(n, k, CPU)


def int4_weight(spec: Int4, scales: torch.dtype) -> Int4Weight:
    weight = random_weight(spec)
    assert isinstance(weight, Int4Weight)
    scale = weight.scale.float() * (1.0 if scales == torch.bfloat16 else 1.001)
    return Int4Weight(spec, weight.codes, scale.to(scales), weight.zero_point)


class PackedProduct(NamedTuple):
    layout: CpuTiles
    codes: PackedCodes
    scales: Scales
    group_size: int

    def dequantize(self) -> torch.Tensor:
        return dequantize(self.codes, self.layout.codes, self.scales, self.group_size, N)

    def times(self, x: torch.Tensor, instructions: Instructions) -> torch.Tensor:
        compiled = kernel(instructions, self.layout.codes, self.scales)
        return coded_matmul.matmul(x, self.codes, self.group_size, compiled)


def packed_of(weight: Weight) -> PackedProduct:
    layout = next(layout for layout in CPU_TILES if isinstance(weight.spec, layout.format))
    return PackedProduct(layout, *layout.arrange(weight))


def instructions_here() -> list[Instructions]:
    """Portable ones, and the best for float32 and for bfloat16."""
    best = {instructions_for(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return sorted({Instructions.PORTABLE} | best | ({Instructions.AMX} if has_amx() else set()))


def serves(packed: PackedProduct, instructions: Instructions, k: int) -> bool:
    at_once = columns_of_a_tile(packed.layout.codes)
    in_tiles = packed.group_size % at_once == 0 and packed.group_size <= PANEL_COLUMNS and k % at_once == 0
    return instructions is not Instructions.AMX or in_tiles


def dtype_of(instructions: Instructions) -> torch.dtype:
    in_pairs = instructions in (Instructions.BF16, Instructions.AMX)
    return torch.bfloat16 if in_pairs else torch.float32


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("zero_point", ["integer", "fractional"])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_packed_int4_weight_is_the_same_weight(zero_point, scales):
    weight = int4_weight(Int4(64, zero_point=zero_point), scales)
    packed = packed_of(weight)
    is_exact = (zero_point, scales) == ("integer", torch.bfloat16)
    assert packed.scales is (Scales.WITH_ZERO if is_exact else Scales.WITH_FLOAT32_ZERO)
    # (code - 8) + (8 - zero) is rounded where code - zero is, and then by one more sum.
    found, expected = packed.dequantize(), weight.dequantize(torch.float64)
    assert relative_error(found, expected) <= rounded(torch.float32, times=3)
    assert zero_point == "fractional" or torch.equal(found, weight.dequantize(torch.float32))


@pytest.mark.parametrize(("spec", "k"), FORMATS, ids=lambda value: getattr(value, "key", str(value)))
def test_a_packed_weight_is_the_same_weight(spec, k):
    weight = random_weight(spec, k=k)
    found, expected = packed_of(weight).dequantize(), weight.dequantize(torch.float32)
    if isinstance(spec, NVFP4):
        # The global scale multiplies last, so another of two products is rounded.
        assert relative_error(found, weight.dequantize(torch.float64)) <= rounded(torch.float32, times=2)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("instructions", instructions_here(), ids=lambda instructions: instructions.name)
@pytest.mark.parametrize(("spec", "k"), FORMATS, ids=lambda value: getattr(value, "key", str(value)))
def test_products_agree_with_float64(instructions, spec, k):
    weight = random_weight(spec, k=k)
    check_products(weight, instructions)


@pytest.mark.parametrize("instructions", instructions_here(), ids=lambda instructions: instructions.name)
def test_products_by_scales_that_bfloat16_does_not_hold_agree_with_float64(instructions):
    weight = int4_weight(Int4(64), torch.float32)
    assert packed_of(weight).scales is Scales.WITH_FLOAT32_ZERO
    check_products(weight, instructions)


def check_products(weight: Weight, instructions: Instructions) -> None:
    packed, k = packed_of(weight), weight.shape[1]
    if not serves(packed, instructions, k):
        return
    dtype = dtype_of(instructions)
    most = (AMX_PANEL_ROWS if instructions is Instructions.AMX else PANEL_ROWS) + 2
    # What stands behind x must not be read, and no NaN may come of it.
    x = torch.cat((torch.randn(most, k), torch.full((1, k), float("nan")))).to(dtype)
    expected = x[:most].double() @ weight.dequantize(torch.float64).T
    for m in (*range(1, 10), 15, 16, 17, 39, 64, most):
        y = packed.times(x[:m], instructions)
        assert y.shape == (m, padded_rows(N)) and y.dtype is dtype
        assert relative_error(y[:, :N], expected[:m]) <= product_bound(dtype, k), m
        assert not y[:, N:].any(), "rows that fill up a block are 0"


@pytest.mark.skipif(instructions_for(torch.bfloat16) != Instructions.BF16, reason="needs AVX-512 with BF16")
def test_weights_are_not_rounded():
    """Scales of a power of two and whole x: every sum is exact, and so is y before it is rounded."""
    weight = int4_weight(Int4(32), torch.bfloat16)
    weight = Int4Weight(weight.spec, weight.codes, torch.full_like(weight.scale, 0.25), weight.zero_point)
    x = torch.randint(-8, 9, (5, 512)).bfloat16()
    y = packed_of(weight).times(x, Instructions.BF16)[:, :N]
    assert torch.equal(y, (x.double() @ weight.dequantize(torch.float64).T).bfloat16())


def test_every_int8_code_is_multiplied_as_it_is():
    """From -128 to 127, each by 1 and all else by 0."""
    spec = Int8(WHOLE_ROW)
    codes = torch.arange(-128, 128).to(torch.int8).repeat(2, 1)
    weight = spec.weight_class(spec, codes, torch.ones(2, 1, dtype=torch.bfloat16))
    for instructions in instructions_here():
        x = torch.eye(256).to(dtype_of(instructions))
        y = packed_of(weight).times(x, instructions)[:, :2]
        assert torch.equal(y.float(), codes.T.float()), instructions


def test_every_scale_of_nvfp4_is_multiplied_as_it_is():
    """All of E4M3, the smallest of which are subnormal, and all codes."""
    spec = NVFP4()
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(16, 1)
    codes = (torch.arange(16, dtype=torch.uint8) * 17).unsqueeze(1).expand(-1, 127 * 8).contiguous()
    weight = spec.weight_class(spec, codes, scales, torch.tensor(0.5))
    x = torch.zeros(127, 127 * 16)
    x[torch.arange(127), 16 * torch.arange(127) + 5] = 1
    for instructions in instructions_here():
        y = packed_of(weight).times(x.to(dtype_of(instructions)), instructions)[:, :16]
        assert torch.equal(y.float(), weight.dequantize(torch.float32)[:, 5::16].T), instructions


def test_a_wrong_zero_point_is_seen():
    """Negative control of the bounds above."""
    weight = int4_weight(Int4(64), torch.bfloat16)
    x = torch.randn(4, 512)
    y = packed_of(weight).times(x, instructions_for(torch.float32))[:, :N]
    weight.zero_point[::8, 0] += 1
    wrong = x.double() @ weight.dequantize(torch.float64).T
    assert relative_error(y, wrong) > 100 * (product_bound(torch.float32, 512) + summed(512))


@pytest.mark.parametrize(
    "instructions", set(instructions_here()) - {Instructions.AMX}, ids=lambda instructions: instructions.name
)
@pytest.mark.parametrize("spec", [Int4(128), NVFP4(), IQ2XXS(), Int8(128)], ids=lambda spec: spec.key)
def test_bits_do_not_depend_on_threads_or_rows(instructions, spec):
    packed = packed_of(random_weight(spec, n=4096))
    x = torch.randn(PANEL_ROWS + 3, 512).to(dtype_of(instructions))
    assert coded_matmul.ALONE <= 4096 * 512 * 2, "more than one thread takes part"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([packed.times(row, instructions) for row in x.split(1)])
        torch.set_num_threads(3)
        together = [packed.times(x[:m], instructions) for m in (2, 3, 7, len(x)) * 5]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(alone[: len(y)], y) for y in together)


@pytest.mark.parametrize("layout", CPU_TILES, ids=lambda layout: layout.name)
def test_packing_compiles_and_multiplying_does_not(layout):
    spec = layout.format()
    cpu_tiles._kernel.cache_clear()
    kernel.cache_clear()
    packed = layout.pack(random_weight(spec), torch.float32)
    assert kernel.cache_info().misses == 1
    for m in (1, 2, 3, 40):
        layout.matmul(torch.randn(m, 512), packed)
    assert kernel.cache_info().misses == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's OpenMP has no GOMP_parallel")
def test_torchs_openmp_is_found():
    assert gomp_parallel() != 0
