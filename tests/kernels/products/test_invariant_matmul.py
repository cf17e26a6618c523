"""The plan of the batch-invariant product of a plain weight, as arithmetic."""

from itertools import pairwise

import pytest
import torch
from scalegate.kernels.invariant_matmul import (
    DEEP_TILES,
    MAX_SPLIT_ROWS,
    MAX_SPLITS,
    SPLIT_TILE,
    SPLIT_UNIT,
    TILES,
    semaphores_of,
    splits_of,
    tile_for,
)

HOPPER, AMPERE = (9, 0), (8, 0)
QWEN3_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)]


@pytest.mark.parametrize(("n", "k"), [*QWEN3_8B, (64, 100), (70, 1096)])
def test_splits_cover_k_once_in_whole_units(n: int, k: int):
    splits = splits_of(n, k)
    units = -(-k // SPLIT_UNIT)
    cuts = [min(k, split * units // splits * SPLIT_UNIT) for split in range(splits + 1)]
    columns = [range(begin, end) for begin, end in pairwise(cuts)]
    assert 1 <= splits <= MAX_SPLITS and len(columns) == splits
    assert [column for split in columns for column in split] == list(range(k))
    assert all(split.start % SPLIT_UNIT == 0 for split in columns)
    assert all(SPLIT_UNIT % tile.bk == 0 for tile in TILES + DEEP_TILES), (
        "a tile's steps end where a split does"
    )


def test_few_weights_are_split_until_one_row_fills_the_gpu():
    assert splits_of(151936, 4096) == 1
    assert all(splits_of(n, k) * -(-n // SPLIT_TILE) >= 132 for n, k in QWEN3_8B)


def test_the_tile_follows_the_rows_and_splits_do_not():
    for n, k in QWEN3_8B:
        assert [tile_for(m, n, k, torch.bfloat16, HOPPER).bm for m in (1, 8, 9, 16, 17, 64, 65, 4096)] == [
            16, 16, 16, 16, 32, 64, 128, 256,
        ]  # fmt: skip
        for m in range(1, MAX_SPLIT_ROWS + 1):
            tile = tile_for(m, n, k, torch.bfloat16, HOPPER)
            assert -(-m // tile.bm) * -(-n // tile.bn) <= semaphores_of(n), m


def test_the_tile_with_the_most_sums_is_for_gpus_that_read_operands_from_shared_memory():
    assert tile_for(4096, 4096, 4096, torch.bfloat16, HOPPER) == TILES[-1]
    assert tile_for(4096, 4096, 4096, torch.bfloat16, AMPERE) == TILES[-2]


def test_few_tiles_have_more_steps_in_flight():
    assert tile_for(64, 4096, 4096, torch.bfloat16, HOPPER) in DEEP_TILES
    assert tile_for(64, 24576, 4096, torch.bfloat16, HOPPER) in TILES
