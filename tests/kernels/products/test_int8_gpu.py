"""INT8 on the GPU: the right product in each layout, the same bits again, and, where promised, at every M."""

import pytest
import torch
from scalegate.kernels.hopper import stream_k, stream_k_config
from scalegate.kernels.hopper.stream_k import Config
from scalegate.kernels.hopper.tile import NUM_SMS
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8, Int8Weight
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.int8_swap_ab import INT8_SWAP_AB, INT8_SWAP_AB_INVARIANT, PACKING
from scalegate.layouts.packing.layout import Problem

pytestmark = pytest.mark.gpu

MAX_ERROR = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
# n, k, group size, activations: whole tiles, ragged N, each size of group, whole rows
PROBLEMS = [
    (256, 512, 128, torch.bfloat16),
    (4096, 4096, 128, torch.bfloat16),
    (200, 768, 32, torch.bfloat16),
    (1001, 1280, 64, torch.bfloat16),
    (712, 1024, WHOLE_ROW, torch.bfloat16),
    (7, 256, 128, torch.bfloat16),
    (520, 1280, 64, torch.float16),
    (4096, 12288, 128, torch.bfloat16),
]
ROWS = (1, 7, 8, 13, 31, 64, 100, 128, 200, 400, 600, 1100, 2000)
ON_HOPPER = [INT8_SWAP_AB, INT8_SWAP_AB_INVARIANT]
OURS = [*(layout.name for layout in ON_HOPPER), "gpu_dequantized", "dequantize"]


def random_weight(n: int, k: int, group_size: int) -> Int8Weight:
    weight = Int8(group_size).random(n, k, torch.device("cuda"))
    scale = (torch.rand_like(weight.scale.float()) * 0.001 + 0.0001).to(torch.bfloat16)
    return Int8Weight(weight.spec, weight.codes, scale)


def refusal_of(layout, weight: Int8Weight, dtype: torch.dtype, mode: str = "tuned") -> str | None:
    n, k = weight.shape
    return layout.refuses(Problem(weight.spec, n, k, dtype, torch.device("cuda"), batch_invariance=mode))


def require(layout, weight: Int8Weight, dtype: torch.dtype = torch.bfloat16) -> None:
    refusal = refusal_of(layout, weight, dtype)
    if refusal is not None:
        pytest.skip(refusal)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("n", "k", "group_size", "dtype"), PROBLEMS)
def test_the_product_is_right_and_its_bits_are_the_same_again(name, n, k, group_size, dtype):
    weight, layout = random_weight(n, k, group_size), LAYOUTS[name]
    require(layout, weight, dtype)
    packed = layout.pack(weight, dtype)
    reference = weight.dequantize(torch.float64)
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").to(dtype)
        expected = x.double() @ reference.T
        answers = []
        for _ in range(3):
            torch.full((m, n), float("nan"), device="cuda", dtype=dtype)  # the next answer's memory, poisoned
            answers.append(layout.matmul(x, packed))
        assert (answers[0].double() - expected).norm() <= MAX_ERROR[dtype] * expected.norm(), m
        if layout in ON_HOPPER:
            assert all(torch.equal(answers[0], again) for again in answers[1:]), m
            assert not packed.tensors["semaphores"].any(), m


@pytest.mark.parametrize("tile", stream_k_config.TILES, ids=lambda tile: f"{tile.m}x{tile.n}x{tile.k_tiles}")
@pytest.mark.parametrize(("n", "k", "group_size", "dtype"), [PROBLEMS[0], PROBLEMS[3]])
def test_every_tile_is_right_wherever_a_cta_begins_in_either_plane(tile, n, k, group_size, dtype):
    weight = random_weight(n, k, group_size)
    require(INT8_SWAP_AB, weight, dtype)
    operand = PACKING.operand(INT8_SWAP_AB.pack(weight, dtype))
    x = torch.randn(2 * tile.m - 3, k, device="cuda").to(dtype)
    expected = x.double() @ weight.dequantize(torch.float64).T
    tiles, units = 2 * -(-n // tile.n), 2 * k // tile.iter_columns
    slots = NUM_SMS * tile.ctas_per_sm
    counts = {tiles, tiles // 2, tiles * units // 2, tiles * units * 2 // 3, tiles * 3 // 4, tiles * 3 // 2}
    for count in sorted(counts):
        y = torch.full((len(x), n), float("nan"), device="cuda", dtype=dtype)
        stream_k.launch(x, operand, y, Config(tile, min(count, slots)))
        assert (y.double() - expected).norm() <= MAX_ERROR[dtype] * expected.norm(), count
        assert not operand.semaphores.any(), count


def test_every_code_is_multiplied_exactly():
    """One column at a time, by x of one and a scale that bf16 has: the weight itself."""
    codes = torch.arange(-128, 128, device="cuda").to(torch.int8).expand(64, 256).contiguous()
    weight = Int8Weight(Int8(64), codes, torch.full((64, 4), 2.0**-7, device="cuda", dtype=torch.bfloat16))
    require(INT8_SWAP_AB, weight)
    x = torch.eye(256, device="cuda", dtype=torch.bfloat16)
    for layout in ON_HOPPER:
        y = layout.matmul(x, layout.pack(weight, torch.bfloat16))
        assert torch.equal(y, weight.dequantize().T), layout.name


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 12288), (712, 1280)])
def test_a_row_keeps_its_bits_whatever_comes_with_it(n, k):
    weight = random_weight(n, k, 64)
    require(INT8_SWAP_AB, weight)
    assert refusal_of(INT8_SWAP_AB_INVARIANT, weight, torch.bfloat16, "pin") is None
    assert refusal_of(INT8_SWAP_AB, weight, torch.bfloat16, "pin") is not None
    packed = INT8_SWAP_AB_INVARIANT.pack(weight, torch.bfloat16)
    x = torch.randn(1100, k, device="cuda", dtype=torch.bfloat16)
    alone = INT8_SWAP_AB_INVARIANT.matmul(x[:1], packed)
    for m in (2, 9, 33, 65, 129, 300, 1100):
        assert torch.equal(INT8_SWAP_AB_INVARIANT.matmul(x[:m], packed)[:1], alone), m


def test_it_takes_half_of_the_memory_of_bf16():
    weight = random_weight(1024, 1024, 128)
    require(INT8_SWAP_AB, weight)
    assert INT8_SWAP_AB.pack(weight, torch.bfloat16).nbytes < 0.55 * 2 * 1024 * 1024
