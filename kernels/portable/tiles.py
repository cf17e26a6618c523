"""Tiles of the portable packed product, by rows of x and by the shared memory of a multiprocessor.

By arithmetic, not by measurement: no number here was timed on a GPU that it is for. A step of the loop brings
128 columns into shared memory, `64 bn` bytes of words and `256 bm` bytes of x. Triton keeps `stages - 1`
steps there, since a step's numbers are in registers when the next is asked for. `stages` is at most 4, which
is three steps in flight: a step takes about 200 cycles, and memory about 600. Up to 64 rows two CTAs and more
share a multiprocessor.

    rows of x    bm   bn   KB a step   99 KB (8.6, 8.9, 12.x)   163 KB (8.0)      227 KB (9.0, 10.x)
          16     16   64          8    4 stages, 24 KB          4                 4
          32     32   64         12    4 stages, 36 KB          4                 4
          64     64  128         24    3 stages, 48 KB          4 stages, 72 KB   4
    and more    128  128         40    3 stages, 80 KB          4 stages, 120 KB  4
    in turns    128   64         36    3 stages, 72 KB          4 stages, 108 KB  4

In turns: if a CTA takes all splits of K, it keeps their total beside the sums of the split it is at, so it
has half as many. A thread then holds 64 sums at most in every tile, beside 32 registers of decoded weights.
"""

from dataclasses import dataclass, replace

STEP_COLUMNS = 128


@dataclass(frozen=True)
class Tile:
    """bm: rows of x; bn: rows of the weight; warps: of a CTA.

    stages: steps in flight, and the one that is multiplied
    """

    bm: int
    bn: int
    stages: int
    warps: int


TILES = (Tile(16, 64, 4, 4), Tile(32, 64, 4, 4), Tile(64, 128, 4, 8), Tile(128, 128, 4, 8))
"""Ascending by rows of x; more rows take several of the last."""
IN_TURNS = Tile(128, 64, 4, 8)
LARGE_STEPS_FROM = 64
"""Rows of x in a tile from which 99 KB have room for three stages only."""
SMALL_SHARED = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities with 99 KB of shared memory for a CTA, by NVIDIA's table."""


def tile_for(m: int, sequential: bool, capability: tuple[int, int]) -> Tile:
    """The tile for m rows of x on a GPU of this compute capability.

    sequential: one CTA takes all splits of K
    """
    tile = IN_TURNS if sequential else next((tile for tile in TILES if m <= tile.bm), TILES[-1])
    if capability in SMALL_SHARED and tile.bm >= LARGE_STEPS_FROM:
        return replace(tile, stages=3)
    return tile
