"""Tiles and splits of the product in E4M3: by rows of x, and by the weight's shape.

Tiles and splits were tuned for Qwen3-8B's shapes on an H200.
"""

from functools import lru_cache

from ..invariant_matmul import MAX_SPLIT_ROWS, SPLIT_UNIT, Tile
from ..triton_imports import triton

GROUP = 128
"""Columns that share a scale, where a row has several."""
TILE_ROWS = 64
SLOTS = 512
"""CTAs that a large GPU runs at a time, with few rows. A constant: splits must not follow the device."""
MAX_SPLITS = 8
MIN_UNITS = 4
"""Of a split: fewer take as long to start as to sum."""


TILES = (Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 3, 4))
"""Ascending by rows of x."""
MORE_ROWS = Tile(64, 128, 128, 3, 4)
MORE_ROWS_IN_BLOCKS = Tile(128, 64, 128, 3, 4)
"""Where the sums of each step are multiplied by scales, and so take registers twice."""
IN_TURNS = Tile(64, 128, 128, 3, 8)
"""If a CTA takes all splits of K, one after the other."""


def tile_for(m: int, sequential: bool, blocks: bool) -> Tile:
    """Return the tile for m rows of x.

    sequential: one CTA takes all splits of K
    blocks:     a row has a scale for every 128 columns
    """
    if blocks and m > TILES[-1].bm:
        return MORE_ROWS_IN_BLOCKS
    if sequential:
        return IN_TURNS
    return next((tile for tile in TILES if m <= tile.bm), MORE_ROWS)


@lru_cache(maxsize=4096)
def splits_of(n: int, k: int) -> int:
    """Return the number of splits of K. It depends on the weight's shape alone and is chosen so that one row
    fills a GPU.
    """
    units = triton.cdiv(k, SPLIT_UNIT)
    return max(1, min(MAX_SPLITS, units // MIN_UNITS, SLOTS // triton.cdiv(n, TILE_ROWS)))


def semaphores_of(n: int) -> int:
    """Return int32 zeros that a weight of n rows needs; every product resets them to zero."""
    most = triton.cdiv(MAX_SPLIT_ROWS, MORE_ROWS.bm) * triton.cdiv(n, MORE_ROWS.bn)
    in_blocks = triton.cdiv(MAX_SPLIT_ROWS, MORE_ROWS_IN_BLOCKS.bm) * triton.cdiv(n, MORE_ROWS_IN_BLOCKS.bn)
    return max(most, in_blocks)
