"""The tables of the portable packed product; the product itself is in `../interpreted/`."""

import pytest
from scalegate.kernels.portable.tiles import (
    IN_TURNS,
    MAX_SPLIT_ROWS,
    MIN_STEPS,
    MORE_ROWS,
    STEP_COLUMNS,
    TILES,
    semaphores_of,
    splits_of,
    tile_for,
)

SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (64, 128), (70, 256), (151936, 4096)]
SHARED_BYTES = 99 * 1024
"""Of a CTA on 8.6, 8.9 and 12.x."""


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_split_has_steps_and_every_tile_a_semaphore(n, k):
    splits = splits_of(n, k // STEP_COLUMNS)
    assert splits == 1 or k // STEP_COLUMNS // splits >= MIN_STEPS
    for m in range(1, MAX_SPLIT_ROWS + 1):
        tile = tile_for(m, sequential=False)
        assert -(-m // tile.bm) * -(-n // tile.bn) <= semaphores_of(n), m


def test_layers_of_an_8b_model_fill_a_gpu_at_one_row():
    for n, k in SHAPES[:4]:
        assert splits_of(n, k // STEP_COLUMNS) * -(-n // TILES[0].bn) >= 2 * 108  # an A100's multiprocessors


@pytest.mark.parametrize("tile", [*TILES, MORE_ROWS, IN_TURNS])
def test_two_tiles_fit_into_the_smallest_shared_memory(tile):
    in_flight = (tile.stages - 1) * (64 * tile.bn + 256 * tile.bm)
    assert 2 * in_flight <= SHARED_BYTES
