"""Our NVFP4 layouts on the GPU: the right product, the same bits again, and, where promised, at every M."""

import pytest
import torch
from scalegate.kernels.hopper import stream_k, stream_k_config
from scalegate.kernels.hopper.stream_k import Config
from scalegate.layouts.formats.int4 import pack_nibbles
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Weight
from scalegate.layouts.packing.layout import Problem
from scalegate.layouts.packing.nvfp4_swap_ab import NVFP4_SWAP_AB, NVFP4_SWAP_AB_INVARIANT, PACKING

pytestmark = pytest.mark.gpu

MAX_ERROR = 4e-3
SHAPES = [(256, 512), (4096, 4096), (200, 416), (712, 1088), (1001, 4160), (7, 16), (4096, 12288)]
"""Whole tiles; ragged N; ragged K, whose last tile has one to three groups."""
ROWS = (1, 7, 8, 13, 31, 64, 100, 128, 200, 400, 600, 1100, 2000)


def random_weight(n: int, k: int) -> NVFP4Weight:
    """Scales of all sizes that E4M3 has, some of them zero."""
    codes = pack_nibbles(torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda"))
    scale = torch.exp2(torch.rand(n, k // 16, device="cuda") * 17 - 9).clamp(max=448)
    scale = torch.where(torch.rand_like(scale) < 0.02, 0.0, scale).to(torch.float8_e4m3fn)
    return NVFP4Weight(NVFP4(), codes, scale, torch.tensor(0.003, device="cuda"))


@pytest.fixture(autouse=True)
def _hopper():
    refusal = NVFP4_SWAP_AB.refuses(Problem(NVFP4(), 64, 64, torch.bfloat16, torch.device("cuda")))
    if refusal is not None:
        pytest.skip(refusal)


@pytest.mark.parametrize("layout", [NVFP4_SWAP_AB, NVFP4_SWAP_AB_INVARIANT], ids=lambda layout: layout.name)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_product_is_right_and_its_bits_are_the_same_again(layout, n, k):
    weight = random_weight(n, k)
    packed = layout.pack(weight, torch.bfloat16)
    reference = weight.dequantize(torch.float64)
    for m in ROWS:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        expected = x.double() @ reference.T
        answers = []
        for _ in range(3):
            torch.full(
                (m, n), float("nan"), device="cuda", dtype=x.dtype
            )  # the next answer's memory, poisoned
            answers.append(layout.matmul(x, packed))
        assert (answers[0].double() - expected).norm() <= MAX_ERROR * expected.norm(), m
        assert all(torch.equal(answers[0], again) for again in answers[1:]), m
        assert not packed.tensors["semaphores"].any(), m


def test_every_code_and_scale_is_multiplied_exactly():
    """One column at a time, by x of one: the weight itself, rounded once."""
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    scale = numbers.view(torch.float8_e4m3fn).cuda()[:, None].expand(-1, 4).contiguous()
    codes = pack_nibbles((torch.arange(64) % 16).to(torch.uint8).expand(len(scale), 64).contiguous().cuda())
    weight = NVFP4Weight(NVFP4(), codes, scale, torch.tensor(1.0, device="cuda"))
    for layout in (NVFP4_SWAP_AB, NVFP4_SWAP_AB_INVARIANT):
        packed = layout.pack(weight, torch.bfloat16)
        got = layout.matmul(torch.eye(64, device="cuda", dtype=torch.bfloat16), packed)
        assert torch.equal(got.T, weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize("tile", stream_k_config.TILES, ids=lambda tile: f"{tile.m}x{tile.n}x{tile.k_tiles}")
def test_every_tile_is_right_however_it_is_split(tile):
    n, k = 1001, 4160
    weight = random_weight(n, k)
    operand = PACKING.operand(NVFP4_SWAP_AB.pack(weight, torch.bfloat16))
    x = torch.randn(2 * tile.m - 3, k, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ weight.dequantize(torch.float64).T
    tiles, units = 2 * -(-n // tile.n), -(-k // tile.iter_columns)
    for count in {tiles, tiles // 2, tiles * units // 2, tiles * 3 // 4, tiles * 3 // 2}:
        y = torch.full((len(x), n), float("nan"), device="cuda", dtype=x.dtype)
        stream_k.launch(x, operand, y, Config(tile, min(count, 132 * tile.ctas_per_sm)))
        assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm(), count
        assert not operand.semaphores.any(), count


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 12288), (6144, 4096), (712, 1088)])
def test_a_row_keeps_its_bits_whatever_comes_with_it(n, k):
    packed = NVFP4_SWAP_AB_INVARIANT.pack(random_weight(n, k), torch.bfloat16)
    x = torch.randn(1100, k, device="cuda", dtype=torch.bfloat16)
    alone = NVFP4_SWAP_AB_INVARIANT.matmul(x[:1], packed)
    for m in (2, 9, 33, 65, 129, 300, 1100):
        assert torch.equal(NVFP4_SWAP_AB_INVARIANT.matmul(x[:m], packed)[:1], alone), m


def test_tuned_bits_do_drift_with_m():
    """Without this the test above could pass on kernels that never change their order of summation."""
    packed = NVFP4_SWAP_AB.pack(random_weight(4096, 12288), torch.bfloat16)
    x = torch.randn(600, 12288, device="cuda", dtype=torch.bfloat16)
    alone = NVFP4_SWAP_AB.matmul(x[:1], packed)
    assert any(not torch.equal(NVFP4_SWAP_AB.matmul(x[:m], packed)[:1], alone) for m in (64, 128, 600))


def test_products_replay_in_a_graph():
    packed = NVFP4_SWAP_AB.pack(random_weight(4096, 4096), torch.bfloat16)
    x = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    wanted = NVFP4_SWAP_AB.matmul(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = NVFP4_SWAP_AB.matmul(x, packed)
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, wanted)
