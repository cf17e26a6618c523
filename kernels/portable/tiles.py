"""Tiles and splits of the portable packed product: by rows of x, and by the weight's shape.

Tiles were tuned for Qwen3-8B's shapes in INT4 on an H200 that runs code for 8.0, by translation
(`tests/bench/kernels/portable_tiles.py`). Nothing was timed on an older GPU: 8.6, 8.9 and 12.x have the same
tiles because all tiles fit into their 99 KB, twice. What was tried for many rows besides is in
`tests/bench/results/kernels/portable_h200.txt`. A step of the loop brings 128 columns into shared memory,
`64 bn` bytes of words and `256 bm` bytes of x. Triton keeps `stages - 1` steps in shared memory, since a
step's numbers are in registers when the next step is asked for.

    rows of x    bm   bn   warps   parts   KB in flight
           8      8   64       2       2   18
          16     16   64       2       2   24
          32     32   64       4       2   36
          64     64   64       4       2   40
    and more     64  128       4       4   48

A warp has 16 or 32 rows of the weight and all rows of x, so no two warps decode the same weights. A tile is
decoded in parts, each multiplied before the next part: a whole tile takes 128 registers beside 64 sums.
"""

from dataclasses import dataclass
from functools import lru_cache

from ..triton_imports import triton

STEP_COLUMNS = 128
TILE_ROWS = 64
"""Rows of a weight in the smallest tile, by which splits and semaphores are counted."""
MAX_SPLIT_ROWS = 256
"""Rows of x up to which splits have CTAs of their own."""
SLOTS = 512
"""CTAs that a large GPU runs at a time, with few rows. A constant: splits must not follow the device."""
MAX_SPLITS = 8
MIN_STEPS = 8
"""Of a split: fewer take as long to start as to sum."""


@dataclass(frozen=True)
class Tile:
    """bm: rows of x; bn: rows of the weight; warps: of a CTA.

    stages: steps in flight, including the step that is being multiplied
    parts: parts in which a step is decoded
    """

    bm: int
    bn: int
    stages: int
    warps: int
    parts: int


TILES = (Tile(8, 64, 4, 2, 2), Tile(16, 64, 4, 2, 2), Tile(32, 64, 4, 4, 2), Tile(64, 64, 3, 4, 2))
"""Ascending by rows of x."""
MORE_ROWS = Tile(64, 128, 3, 4, 4)
IN_TURNS = Tile(64, 128, 3, 4, 2)
"""If a CTA takes all splits of K, one after the other."""


def tile_for(m: int, sequential: bool) -> Tile:
    """Return the tile for m rows of x; sequential: one CTA takes all splits of K."""
    if sequential:
        return IN_TURNS
    return next((tile for tile in TILES if m <= tile.bm), MORE_ROWS)


@lru_cache(maxsize=4096)
def splits_of(n: int, steps: int) -> int:
    """Return the number of splits of K, which has so many steps. It depends on the weight's shape alone and
    is chosen so that one row fills a GPU.
    """
    return max(1, min(MAX_SPLITS, steps // MIN_STEPS, SLOTS // triton.cdiv(n, TILE_ROWS)))


def semaphores_of(n: int) -> int:
    """Return int32 zeros that a weight of n rows needs; every product resets them to zero."""
    more = triton.cdiv(n, MORE_ROWS.bn) * triton.cdiv(MAX_SPLIT_ROWS, MORE_ROWS.bm)
    return max(more, triton.cdiv(n, TILE_ROWS))
