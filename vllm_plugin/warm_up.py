"""Compiles, before vLLM serves, every form of the kernel that a layer's products may use at any M.

vLLM captures graphs of some sizes only, and a prompt's M may be anything in between. All of it is compiled at
the first product of all layers, in the step by which vLLM measures its memory: until then other processes
compile (`compile_ahead.py`), while vLLM loads the weights and compiles its own graphs.
"""

import time
from collections.abc import Callable
from functools import lru_cache

import torch

from ..kernels.hopper import gemm, invariant_config, stream_k_config
from ..layouts.packing.hopper import HopperLayout
from ..layouts.packing.layout import PackedWeight
from .compile_ahead import logger, settings_of_compiler, wait_for_compiler

FINE, FINE_ROWS, COARSE = 8, 1024, 128
"""Steps in which M is looked at, up to so many rows and beyond: a fraction of the tiles there."""


@lru_cache
def rows_looked_at(most: int) -> tuple[int, ...]:
    few = (1, *range(FINE, min(most, FINE_ROWS) + 1, FINE))
    many = range(FINE_ROWS + COARSE, min(most, gemm.MAX_ROWS) + 1, COARSE)
    return (*few, *many, most)


@lru_cache
def rows_to_compile(n: int, columns: int, most: int, batch_invariant: bool) -> dict[object, int]:
    """Return, for each form of the kernel, the smallest number of rows up to `most` that uses it."""
    first: dict[object, int] = {}
    for m in rows_looked_at(most):
        if batch_invariant:
            form: object = invariant_config.tile_for(m, n, columns)
        else:
            config = stream_k_config.config_for(m, n, columns)
            form = config.tile, config.head_iters > 0
        first.setdefault(form, m)
    return first


def rows_by_form(layout: HopperLayout, packed: PackedWeight, most: int) -> dict[object, int]:
    columns = layout.packing.operand(packed).columns
    return rows_to_compile(packed.shape[0], columns, most, layout.batch_invariant)


def multiply_zeros(layout: HopperLayout, packed: PackedWeight, m: int) -> None:
    device = next(iter(packed.tensors.values())).device
    layout.matmul(torch.zeros(m, packed.shape[1], dtype=packed.dtype, device=device), packed)


def warm_up(layout: HopperLayout, packed: PackedWeight, most: int) -> None:
    """Multiply zeros by `packed`, once for each form that numbers of rows up to `most` use."""
    for m in rows_by_form(layout, packed, most).values():
        multiply_zeros(layout, packed, m)


PENDING: list[Callable[[], None]] = []
"""Warms up layers that are not yet warmed up."""


def warm_up_pending() -> None:
    """Warm up what is pending, unless a CUDA graph is being captured, which would record it."""
    if not PENDING or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    waited, began = wait_for_compiler(), time.monotonic()
    with settings_of_compiler():
        while PENDING:
            PENDING.pop()()
    logger.info(
        "scalegate-kernels waited %.1f s for its compiler and loaded its kernels in %.1f s",
        waited,
        time.monotonic() - began,
    )
