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
from torch import Tensor

from ..attention.kvarn.cpu import lanes
from ..attention.kvarn.cpu.compiled import NUMBERS
from ..attention.kvarn.cpu.lanes import WIDTH, fma, load, splat, store, total
from ..attention.kvarn.cpu.tile import ONE, ZERO
from ..cpu import calls, vectors
from ..cpu.calls import Call, StepNumber
from ..cpu.run_calls import compiled_function
from ..cpu.vectors import number_at, pointer, real_at

DIM_MULTIPLE = 2 * WIDTH
ROWS = int(StepNumber.ROWS)
NOTHING = -1
"""In place of the place of what is added."""
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


@njit(error_model="numpy")
def _norm_rows(
    zero: Any, x_at: int, added_at: int, weight_at: int, out_at: int, rows: int, dim: int, eps: float
) -> None:
    size = rows * dim
    x, out = carray(pointer(x_at, zero), size), carray(pointer(out_at, zero), size)
    weight, added = carray(pointer(weight_at, zero), dim), carray(pointer(added_at, zero), size)
    for row in range(0, size, dim):
        if added_at:
            for d in range(row, row + dim, WIDTH):
                store(x, d, load(x, d) + load(added, d))
        norm_row(x, row, weight, out, dim, eps)


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
        _norm_rows(zero, x_at, added_at, weight_at, out_at, rows, dim, eps)

    return rms_norm


def norm_call(x: int, added: int, weight: Tensor, out: int, eps: float) -> Call:
    """x, added, out: places in the step's numbers; `added` is NOTHING if nothing is added to x. The weight,
    contiguous, has to be kept.
    """
    numbers = x, added, weight.data_ptr(), out, len(weight), eps
    return Call(_norm_function(weight.dtype), numbers)


@functools.cache
def _norm_function(dtype: torch.dtype) -> int:
    return compiled_function(_norm(_sources(), np.dtype(str(NUMBERS[dtype])).type(0)))


def _norm(sources: str, zero: np.generic) -> Callable[[Any], None]:
    """The same as `_rms_norm`, for a call of `norm_call`."""

    def norm(numbers: Any) -> None:
        _ = sources
        step, added = number_at(numbers, 0), number_at(numbers, 2)
        added_at = 0 if added == NOTHING else number_at(step, added)
        x_at, out_at = number_at(step, number_at(numbers, 1)), number_at(step, number_at(numbers, 4))
        rows, dim, eps = number_at(step, ROWS), number_at(numbers, 5), real_at(numbers, 6)
        _norm_rows(zero, x_at, added_at, number_at(numbers, 3), out_at, rows, dim, eps)

    return norm


@functools.cache
def _sources() -> str:
    modules = (lanes, vectors, calls)
    files = (Path(str(path)).read_bytes() for path in (__file__, *(each.__file__ for each in modules)))
    return hashlib.sha256(b"".join(files)).hexdigest()
