"""Compiles, before vLLM serves, every form of the kernel that a layer's products may use at any M.

vLLM captures graphs of some sizes only, and a prompt's M may be anything in between.
"""

from functools import lru_cache

import torch

from ..kernels.hopper import gemm, invariant_config, stream_k_config
from ..layouts.packing.hopper import HopperLayout
from ..layouts.packing.layout import PackedWeight

FINE, FINE_ROWS, COARSE = 8, 1024, 128
"""Steps in which M is looked at, up to so many rows and beyond: a fraction of the tiles there."""


@lru_cache
def rows_looked_at(most: int) -> tuple[int, ...]:
    few = (1, *range(FINE, min(most, FINE_ROWS) + 1, FINE))
    many = range(FINE_ROWS + COARSE, min(most, gemm.MAX_ROWS) + 1, COARSE)
    return (*few, *many, most)


@lru_cache
def rows_to_compile(n: int, columns: int, most: int, batch_invariant: bool) -> tuple[int, ...]:
    """Return, for each form of the kernel, the smallest number of rows up to `most` that uses it."""
    first: dict[object, int] = {}
    for m in rows_looked_at(most):
        if batch_invariant:
            form: object = invariant_config.tile_for(m, n, columns)
        else:
            config = stream_k_config.config_for(m, n, columns)
            form = config.tile, config.head_iters > 0
        first.setdefault(form, m)
    return tuple(first.values())


def warm_up(layout: HopperLayout, packed: PackedWeight, most: int) -> None:
    """Multiply zeros by `packed`, once for each form that numbers of rows up to `most` use."""
    n, k = packed.shape
    operand = layout.packing.operand(packed)
    for m in rows_to_compile(n, operand.columns, most, layout.batch_invariant):
        layout.matmul(torch.zeros(m, k, dtype=packed.dtype, device=operand.words.device), packed)
