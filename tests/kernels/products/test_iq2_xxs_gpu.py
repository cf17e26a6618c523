"""Our IQ2_XXS layout on the GPU: the right product at every M, the same bits again, and in graphs."""

import pytest
import torch
from scalegate.kernels.hopper import stream_k
from scalegate.kernels.hopper.stream_k import Config
from scalegate.kernels.iq2_xxs import one_row
from scalegate.kernels.iq2_xxs.matmul import ONE_ROW, ONE_ROW_OF_MANY, TILES
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.packing.iq2_xxs import IQ2_XXS
from scalegate.layouts.packing.layout import PackedWeight, Problem

pytestmark = pytest.mark.gpu

MAX_ERROR = 4e-3
ROWS = (1, 2, 7, 8, 9, 16, 31, 64, 65, 128, 129, 1000)
PROBLEMS = [
    (256, 512, torch.bfloat16),
    (1001, 2304, torch.bfloat16),
    (17, 256, torch.float16),
    (4096, 12288, torch.bfloat16),
    (520, 4096, torch.float16),
]


def packed_weight(n: int, k: int, dtype: torch.dtype) -> tuple[PackedWeight, torch.Tensor]:
    weight = IQ2XXS().random(n, k, torch.device("cuda"))
    refusal = IQ2_XXS.refuses(Problem.of(weight, dtype, torch.device("cuda")))
    if refusal is not None:
        pytest.skip(refusal)
    return IQ2_XXS.pack(weight, dtype), weight.dequantize(torch.float64)


@pytest.mark.parametrize(("n", "k", "dtype"), PROBLEMS)
def test_the_product_is_right_and_its_bits_are_the_same_again(n: int, k: int, dtype: torch.dtype):
    packed, exact = packed_weight(n, k, dtype)
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").to(dtype)
        expected = x.double() @ exact.T
        answers = []
        for _ in range(3):
            torch.full((m, n), float("nan"), device="cuda", dtype=dtype)  # the next answer's memory, poisoned
            answers.append(IQ2_XXS.matmul(x, packed))
        assert (answers[0].double() - expected).norm() <= MAX_ERROR * expected.norm(), m
        assert all(torch.equal(answers[0], again) for again in answers[1:]), m


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.m}x{tile.n}")
def test_every_tile_is_right_however_it_is_split(tile: stream_k.Tile):
    n, k = 1001, 2304
    packed, exact = packed_weight(n, k, torch.bfloat16)
    operand = IQ2_XXS.operand(packed)
    x = torch.randn(2 * tile.m - 3, k, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ exact.T
    tiles, units = 2 * -(-n // tile.n), -(-k // tile.iter_columns)
    for count in {tiles, tiles // 2, tiles * units // 2, tiles * 3 // 4, tiles * 3 // 2}:
        y = torch.full((len(x), n), float("nan"), device="cuda", dtype=x.dtype)
        stream_k.launch(x, operand, y, Config(tile, min(count, 132 * tile.ctas_per_sm)))
        assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm(), count
        assert not operand.semaphores.any(), count


@pytest.mark.parametrize("tile", (*ONE_ROW.values(), ONE_ROW_OF_MANY), ids=str)
@pytest.mark.parametrize(("n", "k"), [(1001, 2304), (48, 256), (4096, 12288)])
def test_one_row_is_right_with_every_tile(tile: one_row.Tile, n: int, k: int):
    packed, exact = packed_weight(n, k, torch.bfloat16)
    operand = IQ2_XXS.operand(packed)
    x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
    y = torch.full((1, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    one_row.launch(x, operand, y, tile)
    expected = x.double() @ exact.T
    assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm()
    assert not operand.semaphores.any()


def test_it_is_captured_in_a_graph_and_reads_new_activations():
    packed, exact = packed_weight(512, 1024, torch.bfloat16)
    for m in (1, 16, 200):
        x = torch.zeros(m, 1024, device="cuda", dtype=torch.bfloat16)
        IQ2_XXS.matmul(x, packed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = IQ2_XXS.matmul(x, packed)
        x.normal_()
        graph.replay()
        expected = x.double() @ exact.T
        assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm(), m
