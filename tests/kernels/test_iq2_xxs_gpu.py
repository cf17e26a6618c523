"""Our IQ2_XXS layout on the GPU: the right product at every M, the same bits again, and in graphs."""

import pytest
import torch
from scalegate.kernels.iq2_xxs import matmul
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.iq2_xxs import IQ2_XXS
from scalegate.layouts.layout import PackedWeight, Problem

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


@pytest.mark.parametrize("tile", [*matmul.ONE_ROW.values(), *matmul.TILES.values()], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1001, 2304), (48, 256)])
def test_every_tile_is_right_at_every_m_it_takes(tile: matmul.Tile, n: int, k: int):
    packed, exact = packed_weight(n, k, torch.bfloat16)
    tensors = packed.tensors
    for m in {1, max(1, 8 * tile.token_tiles - 3), max(1, 8 * tile.token_tiles)}:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        y = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        parts = (tensors[name] for name in ("words", "scales", "codebook", "semaphores"))
        matmul.launch(x, *parts, y, tile)
        expected = x.double() @ exact.T
        assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm(), m


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
