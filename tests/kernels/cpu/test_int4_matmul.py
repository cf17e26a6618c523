"""The CPU's INT4 product beside float64, with each kind of instructions that this CPU has, on any threads."""

import sys

import pytest
import torch
from scalegate.kernels.cpu import int4_matmul
from scalegate.kernels.cpu.int4_matmul import instructions_for, kernel
from scalegate.kernels.cpu.int4_packing import PackedInt4, dequantize, holds_float32, pack, padded_rows
from scalegate.kernels.cpu.int4_tile import Instructions
from scalegate.kernels.cpu.openmp import gomp_parallel
from scalegate.layouts.formats.int4 import Int4, Int4Weight, unpack_nibbles
from scalegate.layouts.packing import cpu_int4_tiles
from scalegate.layouts.packing.cpu_int4_tiles import CPU_INT4_TILES
from scalegate.tests.rounding_bounds import product_bound, rounded, summed

CPU = torch.device("cpu")
N, K = 200, 512


def random_weight(spec: Int4, n: int = N, scales: torch.dtype = torch.bfloat16) -> Int4Weight:
    torch.manual_seed(7)
    weight = spec.random(n, K, CPU)
    scale = weight.scale.float() * (1.0 if scales == torch.bfloat16 else 1.001)
    return Int4Weight(spec, weight.codes, scale.to(scales), weight.zero_point)


def packed_of(weight: Int4Weight) -> PackedInt4:
    return pack(unpack_nibbles(weight.codes), weight.scale, weight.zero_point)


def instructions_here() -> list[Instructions]:
    """Portable ones, and the best for float32 and for bfloat16."""
    best = {instructions_for(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return sorted({Instructions.PORTABLE} | best)


def matmul(x: torch.Tensor, packed: PackedInt4, group_size: int, instructions: Instructions) -> torch.Tensor:
    compiled = kernel(instructions, holds_float32(packed.scales))
    return int4_matmul.matmul(x, *packed, group_size, compiled)


def dtype_of(instructions: Instructions) -> torch.dtype:
    return kernel(instructions, False).dtype


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("zero_point", ["integer", "fractional"])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_packed_weight_is_the_same_weight(zero_point, scales):
    weight = random_weight(Int4(64, zero_point=zero_point), scales=scales)
    packed = packed_of(weight)
    assert holds_float32(packed.scales) == ((zero_point, scales) != ("integer", torch.bfloat16))
    # (code - 8) + (8 - zero) is rounded where code - zero is, and then by one more sum.
    found, expected = dequantize(packed, N), weight.dequantize(torch.float64)
    assert relative_error(found, expected) <= rounded(torch.float32, times=3)
    assert zero_point == "fractional" or torch.equal(found, weight.dequantize(torch.float32))


@pytest.mark.parametrize("instructions", instructions_here(), ids=lambda one: one.name)
@pytest.mark.parametrize(("group_size", "wide"), [(16, False), (128, False), (64, True)])
def test_products_agree_with_float64(instructions, group_size, wide):
    weight = random_weight(Int4(group_size), scales=torch.float32 if wide else torch.bfloat16)
    packed = packed_of(weight)
    assert holds_float32(packed.scales) == wide
    dtype = dtype_of(instructions)
    x = torch.randn(9, K).to(dtype)
    expected = x.double() @ weight.dequantize(torch.float64).T
    for m in range(1, 10):
        y = matmul(x[:m], packed, group_size, instructions)
        assert y.shape == (m, padded_rows(N)) and y.dtype is dtype
        assert relative_error(y[:, :N], expected[:m]) <= product_bound(dtype, K), m
        assert not y[:, N:].any(), "rows that fill up a block are 0"


@pytest.mark.skipif(instructions_for(torch.bfloat16) != Instructions.BF16, reason="needs AVX-512 with BF16")
def test_weights_are_not_rounded():
    """Scales of a power of two and whole x: every sum is exact, and so is y before it is rounded."""
    weight = random_weight(Int4(32))
    weight = Int4Weight(weight.spec, weight.codes, torch.full_like(weight.scale, 0.25), weight.zero_point)
    x = torch.randint(-8, 9, (5, K)).bfloat16()
    y = matmul(x, packed_of(weight), 32, Instructions.BF16)[:, :N]
    assert torch.equal(y, (x.double() @ weight.dequantize(torch.float64).T).bfloat16())


def test_a_wrong_zero_point_is_seen():
    """Negative control of the bounds above."""
    weight = random_weight(Int4(64))
    expected = torch.randn(4, K)
    y = matmul(expected, packed_of(weight), 64, instructions_for(torch.float32))[:, :N]
    weight.zero_point[::8, 0] += 1
    wrong = expected.double() @ weight.dequantize(torch.float64).T
    assert relative_error(y, wrong) > 100 * (product_bound(torch.float32, K) + summed(K))


@pytest.mark.parametrize("instructions", instructions_here(), ids=lambda one: one.name)
def test_bits_do_not_depend_on_threads_or_rows(instructions):
    weight = random_weight(Int4(128), n=4096)
    packed, x = packed_of(weight), torch.randn(7, K).to(dtype_of(instructions))
    assert 8 * weight.codes.numel() * 2 >= int4_matmul.ALONE, "more than one thread takes part"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([matmul(row, packed, 128, instructions) for row in x.split(1)])
        torch.set_num_threads(3)
        together = [matmul(x, packed, 128, instructions) for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(alone, y) for y in together)


def test_packing_compiles_and_multiplying_does_not():
    cpu_int4_tiles._kernel.cache_clear()
    kernel.cache_clear()
    packed = CPU_INT4_TILES.pack(random_weight(Int4(128)), torch.float32)
    assert kernel.cache_info().misses == 1
    for m in (1, 2, 3):
        CPU_INT4_TILES.matmul(torch.randn(m, K), packed)
    assert kernel.cache_info().misses == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's OpenMP has no GOMP_parallel")
def test_torchs_openmp_is_found():
    assert gomp_parallel() != 0
