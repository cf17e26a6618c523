"""E4M3 rows on the GPU, both operands from shared memory: the right product, and the same bits again."""

import pytest
import torch
from scalegate.kernels.device import compute_capability
from scalegate.kernels.fp8 import hopper_matmul
from scalegate.kernels.fp8.round_rows import round_rows
from scalegate.kernels.hopper.packed_operand import SEMAPHORES
from scalegate.kernels.hopper.stream_k import Config
from scalegate.kernels.hopper.tile import NUM_SMS
from scalegate.layouts.formats.fp8 import FP8, FP8Weight
from scalegate.layouts.packing.fp8_scaled import FP8_SCALED
from scalegate.tests.rounding_bounds import rounded, summed_in_e4m3

pytestmark = pytest.mark.gpu

# n, k, activations
PROBLEMS = [
    (256, 512, torch.bfloat16),
    (4096, 4096, torch.bfloat16),
    (200, 416, torch.bfloat16),
    (712, 1040, torch.float16),
    (4096, 12288, torch.float16),
]
ROWS = (1, 7, 8, 13, 31, 64, 100, 128, 200)
TILES = [*hopper_matmul.TILES.values(), *hopper_matmul.WIDE_TILES.values()]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _hopper():
    if compute_capability(CUDA) != hopper_matmul.HOPPER:
        pytest.skip("is written for compute capability 9.0 (Hopper)")


def bound(dtype: torch.dtype) -> float:
    """Relative, of norms: of rounding y, and of sums of 14 bits."""
    return rounded(dtype) + summed_in_e4m3()


def expected(x: torch.Tensor, weight: FP8Weight) -> torch.Tensor:
    codes, scale = round_rows(x)
    return (codes.double() * scale[0].double()[:, None]) @ weight.dequantize(torch.float64).T


@pytest.mark.parametrize(("n", "k", "dtype"), PROBLEMS)
def test_the_product_is_right_and_its_bits_are_the_same_again(n, k, dtype):
    weight = FP8().random(n, k, CUDA)
    packed = FP8_SCALED.pack(weight, dtype)
    for m in ROWS:
        assert hopper_matmul.serves(m, n, k, CUDA)
        x = torch.randn(m, k, device=CUDA, dtype=dtype)
        wanted = expected(x, weight)
        answers = []
        for _ in range(3):
            torch.full((m, n), float("nan"), device=CUDA, dtype=dtype)  # the next answer's memory, poisoned
            answers.append(FP8_SCALED.matmul(x, packed))
        assert (answers[0].double() - wanted).norm() <= bound(dtype) * wanted.norm(), m
        assert all(torch.equal(answers[0], again) for again in answers[1:]), m


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.m}x{tile.n}x{tile.k_tiles}")
@pytest.mark.parametrize(("n", "k", "dtype"), [PROBLEMS[0], PROBLEMS[2], PROBLEMS[3]])
def test_every_tile_is_right_however_it_is_split(tile, n, k, dtype):
    """A CTA for a tile, some, parts of one, two of three; and CTAs that start and end within tiles."""
    weight = FP8().random(n, k, CUDA)
    x = torch.randn(2 * tile.m - 3, k, device=CUDA, dtype=dtype)
    wanted = expected(x, weight)
    tiles = tile.num_tiles(len(x), n)
    iterations = tiles * -(-k // tile.iter_columns)
    slots = min(NUM_SMS * tile.ctas_per_sm, SEMAPHORES, iterations)
    for count in {tiles, 1, max(1, tiles // 2), min(slots, tiles + 1), slots}:
        y = multiply(x, weight, Config(tile, count))
        assert (y.double() - wanted).norm() <= bound(dtype) * wanted.norm(), count
        assert torch.equal(y, multiply(x, weight, Config(tile, count))), count


def multiply(x: torch.Tensor, weight: FP8Weight, config: Config) -> torch.Tensor:
    codes, scale = round_rows(x)
    semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device=CUDA)
    w_scale = weight.scale.float().t().contiguous()
    y = hopper_matmul.matmul(codes, scale[0], weight.codes, w_scale, semaphores, x.dtype, config)
    assert not semaphores.any()
    return y
