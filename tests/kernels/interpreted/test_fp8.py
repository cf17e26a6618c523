"""Products in E4M3 and INT8 and the rounding of their inputs, against their definitions; see conftest.py."""

import pytest
import torch
from scalegate.kernels.e4m3 import CONVERTS_TWICE, rounded_to_odd
from scalegate.kernels.fp8 import round_rows as rounding_module
from scalegate.kernels.fp8.matmul import matmul
from scalegate.kernels.fp8.round_rows import round_rows
from scalegate.kernels.fp8.tiles import MORE_ROWS, semaphores_of, splits_of
from scalegate.kernels.invariant_matmul import Tile
from scalegate.kernels.triton_imports import tl, triton
from scalegate.layouts.formats import int8
from scalegate.layouts.formats.e4m3 import PER_BLOCK, PER_TOKEN, E4M3Input, E4M3StaticInput
from scalegate.layouts.formats.fp8 import BLOCKS, FP8, ROW
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8
from scalegate.tests.rounding_bounds import product_bound

from .test_decode_attention import DEVICE

SMALL = Tile(16, 64, 128, 2, 4)


def operand(spec: FP8, n: int, k: int):
    """Codes [N, K], scales [G, N] and semaphores, and the weight in float64."""
    torch.manual_seed(n + k)
    weight = spec.random(n, k, torch.device(DEVICE))
    semaphores = torch.zeros(semaphores_of(n), dtype=torch.int32, device=DEVICE)
    truth = weight.dequantize(torch.float64)
    return (weight.codes, weight.scale.float().t().contiguous(), semaphores), truth


def rounding_of(in_groups: bool) -> E4M3Input:
    return PER_BLOCK if in_groups else PER_TOKEN


def rounded(x: torch.Tensor, in_groups: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [M, K] and scales [G, M], by the definition."""
    codes, scales = rounding_of(in_groups).codes(x)
    return codes.to(DEVICE), scales.t().contiguous().to(DEVICE)


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("k", [128, 640, 5120])
def test_inputs_are_rounded_to_the_bits_of_the_definition(k: int, in_groups: bool):
    x = torch.randn(5, k).to(torch.float16)
    x[1], x[2, :2], x[3] = 0, torch.tensor([65504.0, -65504.0]), 6e-8
    x[4, :8], x[4, 8:16] = -0.0, 0.0
    codes, scales = round_rows(x.to(DEVICE), in_groups)
    wanted, wanted_scales = rounding_of(in_groups).codes(x)
    assert torch.equal(scales.t().cpu(), wanted_scales)
    zeros, wanted_zeros = (each[4, :16].view(torch.uint8) for each in (codes.cpu(), wanted))
    assert torch.equal(zeros, wanted_zeros), "their signs count"
    assert_bits(codes, wanted)


def test_inputs_are_rounded_by_a_given_scale():
    x, scale = torch.randn(5, 640).mul(300).to(torch.float16), torch.tensor([0.5])
    codes, scales = round_rows(x.to(DEVICE), scale=scale.to(DEVICE))
    assert torch.equal(scales.cpu(), scale.expand(1, 5))
    rounding = E4M3StaticInput(scale[0])
    assert_bits(codes, (rounding.round(x).float() / scale).to(torch.float8_e4m3fn))
    assert float(rounding.round(x).abs().max()) == 224 < float(x.abs().max()), "the largest are clipped"


@triton.jit
def round_to_odd_kernel(values, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, rounded_to_odd(tl.load(values + at)))


def test_numbers_that_are_rounded_to_odd_keep_their_codes_by_way_of_fp16():
    """As Triton converts for compute capability 8.9. Most numbers lie around the middle of two codes."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = ((codes[1:] + codes[:-1]) / 2).view(torch.int32)
    values = torch.cat([(middle + bits).view(torch.float32) for bits in (-9000, -1, 0, 1, 100, 8191, 9000)])
    values = torch.cat([values, -values, torch.randn(8192 - 2 * len(values)) * 60]).to(DEVICE)
    odd = torch.empty_like(values)
    round_to_odd_kernel[(8,)](values, odd, 1024)

    def by_way_of_fp16(values: torch.Tensor) -> torch.Tensor:
        half = values.half()
        too_far = half.float().abs() > values.abs()
        towards_zero = (half.view(torch.int16) - too_far.short()).view(torch.float16)
        return towards_zero.to(torch.float8_e4m3fn).view(torch.uint8)

    wanted = values.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(by_way_of_fp16(odd), wanted)
    assert not torch.equal(by_way_of_fp16(values), wanted)


def test_inputs_for_a_gpu_that_converts_twice_are_rounded_to_the_bits_of_the_definition(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(rounding_module, "compute_capability", lambda device: CONVERTS_TWICE)
    x = torch.randn(5, 640).to(torch.float16)
    for in_groups in (False, True):
        codes, _ = round_rows(x.to(DEVICE), in_groups)
        assert_bits(codes, rounding_of(in_groups).codes(x)[0])


def assert_bits(codes: torch.Tensor, wanted: torch.Tensor) -> None:
    """The interpreter casts to E4M3 with no carry into exponents, cuts subnormals off and rounds ties up."""
    bits, wanted_bits = codes.cpu().view(torch.uint8), wanted.view(torch.uint8)
    compared = (wanted_bits & 0x07 != 0) & (wanted_bits & 0x78 != 0) | (DEVICE == "cuda")
    assert compared.float().mean() > 0.5
    steps = (bits[compared].int() - wanted_bits[compared].int()).abs()
    assert int(steps.max()) <= (0 if DEVICE == "cuda" else 1)
    assert (steps == 0).float().mean() > 0.99


@pytest.mark.parametrize("scale", [ROW, BLOCKS])
@pytest.mark.parametrize(("m", "k"), [(1, 2048), (17, 2048), (3, 384)])
def test_the_product_agrees_with_float64(m: int, k: int, scale: str):
    n = 60
    spec = FP8(scale)
    weight, truth = operand(spec, n, k)
    x = torch.randn(m, k).to(torch.bfloat16)
    want = spec.dynamic_input.round(x.float()).double().to(DEVICE) @ truth.T
    assert k == 384 or splits_of(n, k) > 1
    codes, scales = rounded(x, scale == BLOCKS)
    for _ in range(2 if m == 1 else 1):  # the second time shows that the first left no trace
        y = matmul(codes, scales, *weight, torch.bfloat16, SMALL)
        assert float((y.double() - want).norm() / want.norm()) < product_bound(torch.bfloat16, k)
        assert not weight[2].any()


@pytest.mark.parametrize("k", [128, 5120])
def test_inputs_are_rounded_to_integers_to_the_bits_of_the_definition(k: int):
    x = torch.randn(5, k).to(torch.float16)
    x[1], x[2, :2], x[3] = 0, torch.tensor([65504.0, -65504.0]), 6e-8
    x[4, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # ties, by a scale of 1
    x[4, 4:] = 3
    codes, scales = round_rows(x.to(DEVICE), dtype=torch.int8)
    wanted, wanted_scales = int8.PER_TOKEN.codes(x)
    assert wanted[4, :4].tolist() == [127, 0, 2, -2]
    assert torch.equal(scales.t().cpu(), wanted_scales)
    assert torch.equal(codes.cpu(), wanted)


@pytest.mark.parametrize(("m", "k"), [(1, 2048), (17, 2048), (260, 2048), (3, 200)])
def test_the_product_of_integers_agrees_with_float64(m: int, k: int):
    n = 60
    weight = Int8(WHOLE_ROW, int8.INT8_INPUTS).random(n, k, torch.device(DEVICE))
    semaphores = torch.zeros(semaphores_of(n), dtype=torch.int32, device=DEVICE)
    codes, scales = round_rows(torch.randn(m, k).to(DEVICE, torch.bfloat16), dtype=torch.int8)
    want = (codes.double() * scales.t().double()) @ weight.dequantize(torch.float64).T
    w_scale = weight.scale.float().reshape(1, n)
    tile = SMALL if m < 260 else Tile(64, 64, 128, 2, 4)
    y = matmul(codes, scales, weight.codes, w_scale, semaphores, torch.bfloat16, tile)
    assert float((y.double() - want).norm() / want.norm()) < product_bound(torch.bfloat16, k)
    assert not semaphores.any()
    alone = matmul(
        codes[-1:], scales[:, -1:].contiguous(), weight.codes, w_scale, semaphores, torch.bfloat16, SMALL
    )
    assert torch.equal(alone[0], y[-1])


def test_the_bits_of_a_row_depend_neither_on_the_rows_beside_it_nor_on_the_tile():
    n, k = 64, 2048
    weight, _ = operand(FP8(), n, k)
    codes, scales = rounded(torch.randn(260, k).to(torch.bfloat16))

    def product(rows: int, tile: Tile | None) -> torch.Tensor:
        return matmul(codes[:rows], scales[:, :rows].contiguous(), *weight, torch.bfloat16, tile)

    alone = product(1, SMALL)
    tiles: dict[int, Tile | None] = {20: Tile(16, 128, 128, 2, 4), 260: Tile(128, 64, 128, 2, 4)}
    if DEVICE == "cuda":
        tiles |= dict.fromkeys((7, 16, 31, 64, 65, 256, 260))  # the table's
        tiles[130] = Tile(32, 64, 256, 3, 4)
    for rows, tile in tiles.items():
        assert torch.equal(alone, product(rows, tile)[:1]), rows
    assert not torch.equal(alone, product(2, SMALL)[1:])


def test_every_tile_has_a_semaphore():
    for n in (64, 70, 4096, 151936):
        tiles = -(-256 // MORE_ROWS.bm) * -(-n // MORE_ROWS.bn)
        assert max(tiles, -(-n // SMALL.bn)) <= semaphores_of(n)
