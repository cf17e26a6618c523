"""A product of a plain bf16 weight as code for an older GPU: what cuBLAS is there, as near as can be had.

cuBLAS's own kernels for 8.0 do not load on a Hopper GPU, and its kernels for 9.0 multiply by wgmma, which an
older GPU does not have. This is our own portable product, mma.sync with splits of K, in the fastest of many
tiles for each weight and number of rows. Not a bench by itself.
"""

from collections.abc import Callable
from functools import partial

import torch
from scalegate.kernels.invariant_matmul import (
    DEEP_TILES,
    MAX_SPLIT_ROWS,
    TILES,
    Tile,
    invariant_matmul,
    semaphores_of,
    splits_of,
)
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from torch import Tensor

NAME = "plain bf16"
CANDIDATES = (
    *TILES[:-1],
    *DEEP_TILES,
    Tile(32, 128, 64, 4, 4),
    Tile(64, 128, 64, 3, 4),
    Tile(64, 128, 64, 4, 8),
    Tile(128, 64, 64, 3, 4),
    Tile(128, 128, 32, 4, 4),
    Tile(128, 128, 32, 5, 8),
    Tile(128, 256, 32, 3, 8),
    Tile(256, 64, 32, 4, 4),
    Tile(256, 128, 32, 3, 8),
)
BUDGET = TimingBudget(samples=3, seconds=0.05)


def tiles_of(m: int, n: int, k: int) -> list[Tile]:
    """Tiles that are neither much larger than m rows nor, for the splits of K, more than a weight counts."""
    return [
        tile
        for tile in CANDIDATES
        if min(m, 16) <= tile.bm < max(32, 2 * m)
        and tile.bm >= min(m, 64)
        and (
            splits_of(n, k) == 1
            or m > MAX_SPLIT_ROWS
            or -(-m // tile.bm) * -(-n // tile.bn) <= semaphores_of(n)
        )
    ]


class PlainProduct:
    """The weights [N, K] that a call takes in turn, and the semaphores that they share."""

    def __init__(self, weights: list[Tensor]):
        self._weights = weights
        n, _ = weights[0].shape
        self._semaphores = torch.zeros(semaphores_of(n), dtype=torch.int32, device=weights[0].device)

    def multiply(self, x: Tensor, tile: Tile, i: int) -> Tensor:
        return invariant_matmul(x, self._weights[i % len(self._weights)], self._semaphores, tile)

    def compile(self, m: int) -> None:
        n, k = self._weights[0].shape
        x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
        for tile in tiles_of(m, n, k):
            self.multiply(x, tile, 0)

    def fastest(self, x: Tensor, calls: int, max_error: float) -> Callable[[int], Tensor] | None:
        """The call in the fastest tile whose answer is right."""
        n, k = self._weights[0].shape
        expected = x.double() @ self._weights[0].double().T
        right = {}
        for tile in tiles_of(x.shape[0], n, k):
            error = (self.multiply(x, tile, 0).double() - expected).norm() / expected.norm()
            if float(error) <= max_error:
                right[str(tile)] = partial(self.multiply, x, tile)
            else:
                print(f"{n}x{k} M={x.shape[0]}: {NAME} WRONG in {tile}, error {float(error):.1e}", flush=True)
        if not right:
            return None
        times = interleaved_microseconds(right, calls, x.device, BUDGET)
        return right[min(times, key=lambda name: times[name])]
