"""The portable layouts on the GPU: the right product at every M and in every tile, the same bits again."""

import pytest
import torch
from scalegate.kernels.device import compute_capability, keeps_sums_in_registers
from scalegate.kernels.portable.packed_matmul import matmul
from scalegate.kernels.portable.tiles import IN_TURNS, MORE_ROWS, TILES, Tile
from scalegate.layouts.formats.fp8 import BLOCKS, FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.mxfp4 import MXFP4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.layout import PackedWeight, Problem
from scalegate.layouts.packing.portable import (
    FP8_PORTABLE,
    INT4_PORTABLE,
    INT8_PORTABLE,
    IQ2_XXS_PORTABLE,
    MXFP4_PORTABLE,
    NVFP4_PORTABLE,
    PortableLayout,
)

pytestmark = pytest.mark.gpu

MAX_ERROR = 4e-3
ROWS = (1, 7, 8, 16, 31, 64, 65, 128, 256, 257, 1000)
BF16, FP16 = torch.bfloat16, torch.float16
FORMS = [
    (INT4_PORTABLE, Int4(128), BF16),
    (INT4_PORTABLE, Int4(32, zero_point="fractional"), FP16),
    (NVFP4_PORTABLE, NVFP4(), BF16),
    (MXFP4_PORTABLE, MXFP4(), BF16),
    (INT8_PORTABLE, Int8(128), BF16),
    (IQ2_XXS_PORTABLE, IQ2XXS(), BF16),
    (IQ2_XXS_PORTABLE, IQ2XXS(), FP16),
    (FP8_PORTABLE, FP8(), BF16),
    (FP8_PORTABLE, FP8(), FP16),
    (FP8_PORTABLE, FP8(BLOCKS), BF16),
]


def packed_weight(
    layout: PortableLayout, spec, n: int, k: int, dtype: torch.dtype
) -> tuple[PackedWeight, torch.Tensor]:
    weight = spec.random(n, k, torch.device("cuda"))
    refusal = layout.refuses(Problem.of(weight, dtype, torch.device("cuda")))
    assert refusal is None, refusal
    return layout.pack(weight, dtype), weight.dequantize(torch.float64)


@pytest.mark.parametrize(("n", "k"), [(200, 2304), (4096, 4096)])
@pytest.mark.parametrize(("layout", "spec", "dtype"), FORMS, ids=lambda value: getattr(value, "name", None))
def test_the_product_is_right_and_its_bits_are_the_same_again(
    layout: PortableLayout, spec, dtype: torch.dtype, n: int, k: int
):
    packed, exact = packed_weight(layout, spec, n, k, dtype)
    keeps_bits = keeps_sums_in_registers(compute_capability(torch.device("cuda")))
    first = None
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").to(dtype)
        x[0] = torch.linspace(-1, 1, k)
        expected = x.double() @ exact.T
        answers = []
        for _ in range(2):
            torch.full((m, n), float("nan"), device="cuda", dtype=dtype)  # the next answer's memory, poisoned
            answers.append(layout.matmul(x, packed))
        assert (answers[0].double() - expected).norm() <= MAX_ERROR * expected.norm(), m
        assert torch.equal(*answers), m
        first = answers[0][0] if first is None else first
        if keeps_bits:
            assert torch.equal(answers[0][0], first), m


@pytest.mark.parametrize("tile", [*TILES, MORE_ROWS, IN_TURNS], ids=str)
def test_iq2_xxs_is_right_in_every_tile(tile: Tile):
    n, k = 200, 4096
    packed, exact = packed_weight(IQ2_XXS_PORTABLE, IQ2XXS(), n, k, BF16)
    x = torch.randn(2 * tile.bm - 3, k, device="cuda", dtype=BF16)
    expected = x.double() @ exact.T
    operand = IQ2_XXS_PORTABLE.operand(packed)
    y = matmul(x, operand, n, tile)
    assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm()
    assert not operand.semaphores.any()


def test_it_is_captured_in_a_graph_and_reads_new_activations():
    packed, exact = packed_weight(IQ2_XXS_PORTABLE, IQ2XXS(), 512, 1024, BF16)
    x = torch.zeros(5, 1024, device="cuda", dtype=BF16)
    IQ2_XXS_PORTABLE.matmul(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = IQ2_XXS_PORTABLE.matmul(x, packed)
    x.copy_(torch.randn(5, 1024))
    graph.replay()
    expected = x.double() @ exact.T
    assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm()
