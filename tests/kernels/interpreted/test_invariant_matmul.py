"""The batch-invariant product of a plain weight against fp64; see conftest.py."""

import pytest
import torch
from scalegate.kernels.invariant_matmul import Tile, invariant_matmul, semaphores_of, splits_of
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.rounding_bounds import summed

from .test_decode_attention import DEVICE

TILES = [Tile(8, 64, 128, 2, 4), Tile(64, 64, 64, 2, 4), Tile(32, 128, 64, 2, 8)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("n", "k"), exhaustive_but([(64, 256), (130, 768), (70, 1096)], (130, 768)))
@pytest.mark.parametrize("m", [1, 9, 260])
def test_products_with_and_without_splits(m: int, n: int, k: int, tile: Tile):
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator).to(DEVICE)
    weight = torch.randn(n, k, generator=generator).to(DEVICE)
    semaphores = torch.zeros(semaphores_of(n), dtype=torch.int32, device=DEVICE)
    for _ in range(2 if m == 1 else 1):  # the second time shows that the first left no trace
        y = invariant_matmul(x, weight, semaphores, tile)
        want = x.double() @ weight.double().T
        assert float((y.double() - want).norm() / want.norm()) < summed(k)
        assert not semaphores.any()
    assert k == 256 or splits_of(n, k) > 1
