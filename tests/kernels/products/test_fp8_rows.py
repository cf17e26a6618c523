"""E4M3 rows on Hopper, without a GPU: which products they serve, their tiles and splits, what TMA is told."""

import pytest
import torch
from scalegate.kernels.fp8 import hopper_matmul
from scalegate.kernels.fp8.rows import E4M3Rows
from scalegate.kernels.hopper.packed_operand import SEMAPHORES, PackedOperand
from scalegate.kernels.hopper.tile import NUM_SMS

SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (2560, 9728), (8, 64)]
TILES = [*hopper_matmul.TILES.values(), *hopper_matmul.WIDE_TILES.values()]


def test_splits_and_tiles_depend_on_the_bucket_of_m_alone_within_it():
    for low, high in ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256)):
        for n, k in SHAPES:
            assert hopper_matmul.config_for(low, n, k) == hopper_matmul.config_for(high, n, k)


def test_no_cta_is_idle():
    for m in (1, 9, 17, 64, 100, 200):
        for n, k in SHAPES:
            chosen = hopper_matmul.config_for(m, n, k)
            tiles = chosen.tile.num_tiles(m, n)
            assert chosen.tile in TILES
            assert 1 <= chosen.num_ctas <= tiles * -(-k // chosen.tile.iter_columns)
            slots = NUM_SMS * chosen.tile.ctas_per_sm
            assert chosen.num_ctas == tiles or chosen.num_ctas <= min(slots, SEMAPHORES)


def test_it_serves_rows_that_tma_loads_on_hopper_alone(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(hopper_matmul, "compute_capability", lambda _: (9, 0))
    for n, most in ((4096, 256), (6144, 128), (24576, 16)):
        assert hopper_matmul.serves(1, n, 4096, device) and hopper_matmul.serves(most, n, 4096, device)
        assert not hopper_matmul.serves(most + 1, n, 4096, device)
    for m, n, k in ((0, 4096, 4096), (1, 4098, 4096), (1, 4096, 4104)):
        assert not hopper_matmul.serves(m, n, k, device)
    monkeypatch.setattr(hopper_matmul, "compute_capability", lambda _: (10, 0))
    assert not hopper_matmul.serves(1, 4096, 4096, device)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.m}x{tile.n}x{tile.k_tiles}")
def test_tma_takes_the_scales_of_a_transposed_column(tile):
    pytest.importorskip("triton")
    n, k = 200, 416
    scale_words = hopper_matmul.words_of(torch.rand(n, 1).t().contiguous())
    codes = torch.zeros(n, k).to(torch.float8_e4m3fn)
    operand = PackedOperand(codes, scale_words, torch.zeros(1), E4M3Rows(half=False))
    activations, words, scales = operand.descriptors(torch.zeros(3, k).to(torch.float8_e4m3fn), tile)
    assert (activations.block_shape, words.block_shape, scales.block_shape) == (
        [tile.m, tile.k_tiles * 64],
        [tile.n, tile.k_tiles * 64],
        [1, tile.n],
    )
    assert operand.columns == k
