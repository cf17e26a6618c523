"""INT4 with FP8 activations on the GPU: the right product within E4M3's sums, and the same bits again."""

import pytest
import torch
from scalegate.kernels.fp8.round_rows import round_rows
from scalegate.kernels.hopper.packed_operand import SEMAPHORES
from scalegate.kernels.hopper.stream_k import Config
from scalegate.kernels.hopper.tile import NUM_SMS
from scalegate.kernels.int4 import e4m3_matmul
from scalegate.layouts.formats.int4 import Int4, Int4Weight
from scalegate.layouts.packing.int4_fp8 import INT4_FP8
from scalegate.layouts.packing.layout import PackedWeight, Problem
from scalegate.tests.rounding_bounds import rounded, summed_in_e4m3

pytestmark = pytest.mark.gpu

# n, k, group size, activations
PROBLEMS = [
    (256, 512, 128, torch.bfloat16),
    (4096, 4096, 128, torch.bfloat16),
    (200, 416, 32, torch.bfloat16),
    (712, 1088, 64, torch.float16),
    (1001, 2176, 128, torch.float16),
    (512, 2048, 256, torch.bfloat16),
    (4096, 12288, 128, torch.float16),
]
ROWS = (1, 7, 8, 13, 31, 64, 100, 128, 200, 400, 600, 1100, 2000)
CUDA = torch.device("cuda")


def spec_of(group_size: int) -> Int4:
    return Int4(group_size, symmetric=True, activations="fp8")


@pytest.fixture(autouse=True)
def _hopper():
    refusal = INT4_FP8.refuses(Problem(spec_of(128), 256, 512, torch.bfloat16, CUDA))
    if refusal is not None:
        pytest.skip(refusal)


def bound(dtype: torch.dtype) -> float:
    """Relative, of norms: of rounding y, and of sums of 14 bits."""
    return rounded(dtype, times=2) + summed_in_e4m3()


def expected(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    codes, scale = round_rows(x)
    return (codes.double() * scale[0].double()[:, None]) @ weight.dequantize(torch.float64).T


@pytest.mark.parametrize(("n", "k", "group_size", "dtype"), PROBLEMS)
def test_the_product_is_right_and_its_bits_are_the_same_again(n, k, group_size, dtype):
    weight = spec_of(group_size).random(n, k, CUDA)
    packed = INT4_FP8.pack(weight, dtype)
    for m in ROWS:
        x = torch.randn(m, k, device=CUDA, dtype=dtype)
        wanted = expected(x, weight)
        answers = []
        for _ in range(3):
            torch.full((m, n), float("nan"), device=CUDA, dtype=dtype)  # the next answer's memory, poisoned
            answers.append(INT4_FP8.matmul(x, packed))
        assert (answers[0].double() - wanted).norm() <= bound(dtype) * wanted.norm(), m
        assert all(torch.equal(answers[0], again) for again in answers[1:]), m


@pytest.mark.parametrize("tile", e4m3_matmul.TILES, ids=lambda tile: f"{tile.m}x{tile.n}x{tile.k_tiles}")
@pytest.mark.parametrize(("n", "k", "group_size", "dtype"), [PROBLEMS[0], PROBLEMS[2], PROBLEMS[4]])
def test_every_tile_is_right_however_it_is_split(tile, n, k, group_size, dtype):
    """A CTA for a tile, some, parts of one, two of three; and CTAs that start and end within tiles."""
    weight = spec_of(group_size).random(n, k, CUDA)
    packed = INT4_FP8.pack(weight, dtype)
    tile = e4m3_matmul.for_groups(tile, group_size)
    x = torch.randn(2 * tile.m - 3, k, device=CUDA, dtype=dtype)
    wanted = expected(x, weight)
    tiles = tile.num_tiles(len(x), n)
    iterations = tiles * -(-k // tile.iter_columns)
    slots = min(NUM_SMS * tile.ctas_per_sm, SEMAPHORES, iterations)
    for count in {tiles, 1, max(1, tiles // 2), min(slots, tiles + 1), slots}:
        y = multiply(x, packed, Config(tile, count))
        assert (y.double() - wanted).norm() <= bound(dtype) * wanted.norm(), count
        assert torch.equal(y, multiply(x, packed, Config(tile, count))), count


def multiply(x: torch.Tensor, packed: PackedWeight, config: Config) -> torch.Tensor:
    words, scale_words, semaphores = packed.tensors.values()
    codes, scale = round_rows(x)
    group_size = packed.attributes["group_size"]
    n = packed.shape[0]
    return e4m3_matmul.matmul(codes, scale[0], words, scale_words, semaphores, n, group_size, x.dtype, config)
