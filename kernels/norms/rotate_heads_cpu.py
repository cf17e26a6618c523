"""Rotary embedding on a CPU, with the norms of query and key heads before it, in place; in numba.

    x    [rows, q_heads + k_heads, D], as a merged product leaves it: other numbers may follow in each row
    cos  [positions, D], sin likewise

    x[:D/2], x[D/2:]  =  x[:D/2] * cos[:D/2] - x[D/2:] * sin[:D/2],  x[D/2:] * cos[D/2:] + x[:D/2] * sin[D/2:]

Every product and every sum is rounded to the dtype, as in transformers, so the bits are the same.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types

from ..attention.kvarn.cpu import lanes
from ..attention.kvarn.cpu.compiled import NUMBERS
from ..attention.kvarn.cpu.lanes import WIDTH, load, store
from ..cpu import vectors
from ..cpu.vectors import number_at, pointer
from . import rms_norm_cpu
from .rms_norm_cpu import norm_row

Kernel = Callable[..., None]


@functools.cache
def rotate_heads(dtype: torch.dtype) -> Kernel:
    """Return `rotate_heads` compiled for one dtype and heads that `rms_norm_cpu` serves."""
    zero = np.dtype(str(NUMBERS[dtype])).type(0)
    compiled = njit(nogil=True, error_model="numpy")(_rotate_heads(_sources(), zero))
    # Raised where no folder can be written to.
    with contextlib.suppress(RuntimeError):
        compiled.enable_caching()
    compiled.compile((*(types.int64,) * 11, types.float64, types.float64))
    compiled.disable_compile()
    return compiled


@njit(error_model="numpy")
def _rounded(scratch: Any, number: Any) -> Any:
    """Round lanes to the dtype of scratch, an array of 16 numbers."""
    store(scratch, 0, number)
    return load(scratch, 0)


@njit(error_model="numpy")
def _rotate(x: Any, at: int, dim: int, cos: Any, sin: Any, place: int, scratch: Any) -> None:
    """Rotate x[at : at + dim] by the angles cos[place :] and sin[place :]."""
    half = dim // 2
    for d in range(0, half, WIDTH):
        first, second = load(x, at + d), load(x, at + half + d)
        by_cos = _rounded(scratch, first * load(cos, place + d))
        by_sin = _rounded(scratch, second * load(sin, place + d))
        store(x, at + d, by_cos - by_sin)
        by_cos = _rounded(scratch, second * load(cos, place + half + d))
        by_sin = _rounded(scratch, first * load(sin, place + half + d))
        store(x, at + half + d, by_cos + by_sin)


def _rotate_heads(sources: str, zero: np.generic) -> Kernel:
    """sources: a digest of all source code that is compiled into the kernel, since numba's cache looks at
    this file alone
    zero: a number of the type that the tensors' memory is read as
    """

    def rotate_heads(
        x_at: int, stride: int, rows: int, q_heads: int, k_heads: int, dim: int, q_weight_at: int,
        k_weight_at: int, cos_at: int, sin_at: int, positions_at: int, q_eps: float, k_eps: float,
    ) -> None:  # fmt: skip
        """stride: numbers from one row of x to the next
        q_weight_at, k_weight_at: addresses of the norms' weights [D]; 0 for heads without a norm
        positions_at: address of the rows' positions, int64
        """
        _ = sources
        x = carray(pointer(x_at, zero), rows * stride)
        cos, sin = carray(pointer(cos_at, zero), dim), carray(pointer(sin_at, zero), dim)
        q_weight = carray(pointer(q_weight_at, zero), dim)
        k_weight = carray(pointer(k_weight_at, zero), dim)
        scratch = np.empty(WIDTH, x.dtype)
        for row in range(rows):
            place = number_at(positions_at, row) * dim
            for head in range(q_heads + k_heads):
                at = row * stride + head * dim
                if head < q_heads:
                    if q_weight_at:
                        norm_row(x, at, q_weight, x, dim, q_eps)
                elif k_weight_at:
                    norm_row(x, at, k_weight, x, dim, k_eps)
                _rotate(x, at, dim, cos, sin, place, scratch)

    return rotate_heads


@functools.cache
def _sources() -> str:
    modules = (lanes, vectors, rms_norm_cpu)
    files = (Path(str(path)).read_bytes() for path in (__file__, *(each.__file__ for each in modules)))
    return hashlib.sha256(b"".join(files)).hexdigest()
