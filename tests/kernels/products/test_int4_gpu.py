"""Our INT4 layouts on the GPU: the right product, the same bits again, and, where promised, at every M."""

import pytest
import torch
from scalegate.kernels.hopper import stream_k, stream_k_config
from scalegate.kernels.hopper.packed_operand import PackedOperand
from scalegate.kernels.hopper.stream_k import Config
from scalegate.kernels.hopper.tile import NUM_SMS
from scalegate.layouts.formats.int4 import Int4, Int4Weight, pack_nibbles
from scalegate.layouts.packing.layout import Problem
from scalegate.layouts.packing.swap_ab import PACKING, SWAP_AB, SWAP_AB_INVARIANT

pytestmark = pytest.mark.gpu

MAX_ERROR = 4e-3
# n, k, group size, fractional zeros, activations
PROBLEMS = [
    (256, 512, 128, False, torch.bfloat16),
    (4096, 4096, 128, False, torch.bfloat16),
    (200, 416, 32, False, torch.bfloat16),
    (712, 1088, 64, True, torch.bfloat16),
    (1001, 4160, 32, True, torch.bfloat16),
    (1001, 2176, 128, False, torch.bfloat16),
    (520, 1152, 128, True, torch.float16),
    (520, 1152, 64, False, torch.float16),
    (4096, 12288, 128, False, torch.bfloat16),
]
ROWS = (1, 7, 8, 13, 31, 64, 100, 128, 200, 400, 600, 1100, 2000)


def random_weight(n: int, k: int, group_size: int, fractional: bool) -> Int4Weight:
    codes = pack_nibbles(torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda"))
    scale = (torch.rand(n, k // group_size, device="cuda") * 0.02 + 0.001).to(torch.bfloat16)
    zero = torch.rand(n, k // group_size, device="cuda") * 15
    spec = Int4(group_size, zero_point="fractional" if fractional else "integer")
    return Int4Weight(spec, codes, scale, zero if fractional else zero.to(torch.uint8))


def packed_operand(weight: Int4Weight, dtype: torch.dtype) -> PackedOperand:
    """What stream-K is launched with; skips on a chip that it is not for."""
    refusal = SWAP_AB.refuses(Problem.of(weight, dtype, torch.device("cuda")))
    if refusal is not None:
        pytest.skip(refusal)
    return PACKING.operand(SWAP_AB.pack(weight, dtype))


def exact(weight: Int4Weight) -> torch.Tensor:
    codes = torch.stack((weight.codes & 0xF, weight.codes >> 4), -1).view(weight.shape).double()
    spread = weight.spec.group_size
    zero = weight.zero_point.double().repeat_interleave(spread, 1)
    return (codes - zero) * weight.scale.double().repeat_interleave(spread, 1)


@pytest.mark.parametrize("layout", [SWAP_AB, SWAP_AB_INVARIANT], ids=lambda layout: layout.name)
@pytest.mark.parametrize(("n", "k", "group_size", "fractional", "dtype"), PROBLEMS)
def test_the_product_is_right_and_its_bits_are_the_same_again(layout, n, k, group_size, fractional, dtype):
    weight = random_weight(n, k, group_size, fractional)
    refusal = layout.refuses(Problem.of(weight, dtype, torch.device("cuda")))
    if refusal is not None:
        return
    packed = layout.pack(weight, dtype)
    reference = exact(weight)
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").to(dtype)
        expected = x.double() @ reference.T
        answers = []
        for _ in range(4):
            torch.full((m, n), float("nan"), device="cuda", dtype=dtype)  # the next answer's memory, poisoned
            answers.append(layout.matmul(x, packed))
        assert (answers[0].double() - expected).norm() <= MAX_ERROR * expected.norm(), m
        assert all(torch.equal(answers[0], again) for again in answers[1:]), m


@pytest.mark.parametrize("tile", stream_k_config.TILES, ids=lambda tile: f"{tile.m}x{tile.n}x{tile.k_tiles}")
@pytest.mark.parametrize(("n", "k", "group_size", "fractional", "dtype"), [PROBLEMS[0], PROBLEMS[4]])
def test_every_tile_is_right_however_it_is_split(tile, n, k, group_size, fractional, dtype):
    """A CTA for a tile, some, parts of one, two of three; and CTAs that start and end within tiles."""
    weight = random_weight(n, k, group_size, fractional)
    operand = packed_operand(weight, dtype)
    x = torch.randn(2 * tile.m - 3, k, device="cuda").to(dtype)
    expected = x.double() @ exact(weight).T
    tiles, units = 2 * -(-n // tile.n), -(-k // tile.iter_columns)
    slots = NUM_SMS * tile.ctas_per_sm
    counts = {tiles, tiles // 2, tiles * units // 2, tiles * units * 2 // 3, tiles * 3 // 4, tiles * 3 // 2}
    for count in sorted(counts):
        y = torch.full((len(x), n), float("nan"), device="cuda", dtype=dtype)
        stream_k.launch(x, operand, y, Config(tile, min(count, slots)))
        assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm(), count
        assert not operand.semaphores.any(), count


@pytest.mark.parametrize(
    "tile",
    [
        stream_k_config.TILE_128X64,
        stream_k_config.TILE_128X128,
        stream_k_config.TILE_256X64,
        stream_k_config.TILE_256X128,
    ],
)
@pytest.mark.parametrize(
    ("period", "offsets"), [(1, (0,)), (2, (0, 3)), (2, (0, -2)), (3, (0, 3, -1)), (4, (0, 2, 1, -1))]
)
def test_start_offsets_are_right(tile, period, offsets):
    """CTAs for one, two or three tiles of sixteen iterations, as `balanced_start_offsets` may choose."""
    n, k = 6 * tile.n, 16 * tile.iter_columns
    weight = random_weight(n, k, 128, False)
    operand = packed_operand(weight, torch.bfloat16)
    x = torch.randn(tile.m, k, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ exact(weight).T
    for tiles in (1, 2, 3):
        if period % tiles == 0 and period > 1:
            continue
        y = torch.full((len(x), n), float("nan"), device="cuda", dtype=torch.bfloat16)
        again = torch.full_like(y, float("nan"))
        for answer in (y, again):
            stream_k.launch(x, operand, answer, Config(tile, 6 // tiles * period, offsets))
        assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm(), tiles
        assert torch.equal(y, again) and not operand.semaphores.any(), tiles


@pytest.mark.parametrize(
    ("n", "k", "group_size", "fractional", "dtype"), [PROBLEMS[1], PROBLEMS[4], PROBLEMS[6]]
)
@pytest.mark.parametrize("each", [1, 2, 4, 8])
def test_heads_and_tails_are_right_however_long(each, n, k, group_size, fractional, dtype):
    tile = stream_k_config.TILE_256X64
    weight = random_weight(n, k, group_size, fractional)
    operand = packed_operand(weight, dtype)
    units = -(-k // tile.iter_columns)
    for m in (tile.m - 3, 2 * tile.m - 3):
        tiles = tile.num_tiles(m, n)
        if tiles % each or tiles + tiles // each > NUM_SMS:
            continue
        x = torch.randn(m, k, device="cuda").to(dtype)
        expected = x.double() @ exact(weight).T
        for head in {1, 2, units // 2, units - 1}:
            y = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
            again = torch.full_like(y, float("nan"))
            for answer in (y, again):
                stream_k.launch(x, operand, answer, Config(tile, tiles + tiles // each, head_iters=head))
            assert (y.double() - expected).norm() <= MAX_ERROR * expected.norm(), (m, head)
            assert torch.equal(y, again) and not operand.semaphores.any(), (m, head)


@pytest.mark.parametrize(
    "tile",
    [
        stream_k_config.TILE_128X64,
        stream_k_config.TILE_128X128,
        stream_k_config.TILE_256X64,
        stream_k_config.TILE_256X128,
    ],
)
@pytest.mark.parametrize("infinite", [False, True])
def test_rows_of_any_size_are_right_beside_each_other_where_tiles_are_split(tile, infinite):
    """Sums travel in fp16 by scales that rows share: small ones beside large, or beside infinite ones."""
    n, k = 6 * tile.n, 16 * tile.iter_columns
    weight = random_weight(n, k, 128, False)
    operand = packed_operand(weight, torch.bfloat16)
    decades = 0 if infinite else 8
    sizes = 10 ** (decades * (torch.rand(tile.m, 1, device="cuda") - 0.5))
    x = (torch.randn(tile.m, k, device="cuda") * sizes).to(torch.bfloat16)
    expected = x.double() @ exact(weight).T
    finite = torch.arange(tile.m, device="cuda") != (5 if infinite else -1)
    if infinite:
        x[5, -1] = float("inf")  # infinite sums, not NaN, and of the part of K that is sent
    splits = [(4, 0), (9, 0), (16, 0), (33, 0)] + [(9, 11)] * (tile == stream_k_config.TILE_256X64)
    for count, head in splits:
        y = torch.full((tile.m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        stream_k.launch(x, operand, y, Config(tile, count, head_iters=head))
        errors = (y.double() - expected)[finite].norm(dim=1) / expected[finite].norm(dim=1)
        assert errors.max() <= MAX_ERROR, (count, head)
        assert not y[~finite].isfinite().any()


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 12288), (6144, 4096), (712, 1088)])
def test_a_row_keeps_its_bits_whatever_comes_with_it(n, k):
    weight = random_weight(n, k, 64, False)
    if SWAP_AB.refuses(Problem.of(weight, torch.bfloat16, torch.device("cuda"))) is not None:
        return
    packed = SWAP_AB_INVARIANT.pack(weight, torch.bfloat16)
    x = torch.randn(1100, k, device="cuda", dtype=torch.bfloat16)
    alone = SWAP_AB_INVARIANT.matmul(x[:1], packed)
    for m in (2, 9, 33, 65, 129, 300, 1100):
        assert torch.equal(SWAP_AB_INVARIANT.matmul(x[:m], packed)[:1], alone), m


def test_tuned_bits_do_drift_with_m():
    """Without this the test above could pass on kernels that never change their order of summation."""
    weight = random_weight(4096, 12288, 128, False)
    if SWAP_AB.refuses(Problem.of(weight, torch.bfloat16, torch.device("cuda"))) is not None:
        return
    packed = SWAP_AB.pack(weight, torch.bfloat16)
    x = torch.randn(600, 12288, device="cuda", dtype=torch.bfloat16)
    alone = SWAP_AB.matmul(x[:1], packed)
    assert any(not torch.equal(SWAP_AB.matmul(x[:m], packed)[:1], alone) for m in (64, 128, 600))
