"""RMSNorm on a CPU in one pass over each row, in numba; transformers' modules need seven torch ops for it.

    out[r, d] = weight[d] * round(x[r, d] / sqrt(mean(x[r] ** 2) + eps))

The kernel can add a residual to x first. The arithmetic is in fp32, except that sums of residuals and the
results of both products are rounded to the dtype, as in transformers. Sums have one order, so a row's bits do
not depend on other rows. On CUDA, norms are compiled together with neighbouring operations instead.
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
from ..attention.kvarn.cpu.lanes import WIDTH, fma, load, splat, store, total
from ..attention.kvarn.cpu.tile import ONE, ZERO
from ..cpu import vectors
from ..cpu.vectors import pointer

DIM_MULTIPLE = 2 * WIDTH
Kernel = Callable[..., None]


def serves(dtype: torch.dtype, dim: int) -> bool:
    return dtype in NUMBERS and dim % DIM_MULTIPLE == 0


@functools.cache
def rms_norm(dtype: torch.dtype) -> Kernel:
    """Return `rms_norm` compiled for one dtype; the compiled code is kept on disk.

    It takes addresses, since handing over an array costs as much as the norm of a small row.
    """
    zero = np.dtype(str(NUMBERS[dtype])).type(0)
    compiled = njit(nogil=True, error_model="numpy")(_rms_norm(_sources(), zero))
    # Raised where no folder can be written to.
    with contextlib.suppress(RuntimeError):
        compiled.enable_caching()
    compiled.compile((*(types.int64,) * 6, types.float64))
    compiled.disable_compile()
    return compiled


@njit(error_model="numpy")
def norm_row(x: Any, at: int, weight: Any, out: Any, dim: int, eps: float) -> None:
    """Write the norm of x[at : at + dim] to out, which may be x, at the same place."""
    even = odd = splat(ZERO)
    for d in range(at, at + dim, 2 * WIDTH):
        first, second = load(x, d), load(x, d + WIDTH)
        even, odd = fma(first, first, even), fma(second, second, odd)
    by = splat(ONE / np.sqrt(total(even + odd) / np.float32(dim) + np.float32(eps)))
    for d in range(0, dim, WIDTH):
        store(out, at + d, load(x, at + d) * by)  # rounds it
        store(out, at + d, load(out, at + d) * load(weight, d))


def _rms_norm(sources: str, zero: np.generic) -> Kernel:
    """sources: a digest of all source code that is compiled into the kernel, since numba's cache looks at
    this file alone
    zero: a number of the type that the tensors' memory is read as
    """

    def rms_norm(
        x_at: int, added_at: int, weight_at: int, out_at: int, rows: int, dim: int, eps: float
    ) -> None:
        """Addresses of x, of what is added to x in place, and of out, all contiguous [rows, dim], and of the
        weight [dim]. added_at is 0 if nothing is added.
        """
        _ = sources
        size = rows * dim
        x, out = carray(pointer(x_at, zero), size), carray(pointer(out_at, zero), size)
        weight, added = carray(pointer(weight_at, zero), dim), carray(pointer(added_at, zero), size)
        for row in range(0, size, dim):
            if added_at:
                for d in range(row, row + dim, WIDTH):
                    store(x, d, load(x, d) + load(added, d))
            norm_row(x, row, weight, out, dim, eps)

    return rms_norm


@functools.cache
def _sources() -> str:
    files = (Path(str(path)).read_bytes() for path in (__file__, lanes.__file__, vectors.__file__))
    return hashlib.sha256(b"".join(files)).hexdigest()
