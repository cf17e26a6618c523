"""The INT4 product on a CPU, compiled by numba: blocks of 64 rows of the weight, on torch's threads.

The product reads four bits per weight and multiplies as described in `int4_tile.py`. A thread takes another
block when it has finished one, so a thread that the system interrupts costs only a block's time. Signatures
are fixed: nothing compiles after `kernel`. Compiled code is kept on disk, beside the source or in the user's
cache folder.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cfunc, njit, types
from numba.core import config
from numba.core.codegen import get_host_cpu_features
from torch import Tensor

from . import int4_packing, int4_tile, vectors
from .int4_packing import BLOCK, COLUMNS, TILES
from .int4_tile import ROWS, Instructions, multiply, tiles_at_once, total
from .openmp import gomp_parallel
from .vectors import BYTES, number_at, room, run, take_number

ALONE = 1 << 20
"""Products and weights, counted together, below which a second thread costs more than it saves."""


class Kernel(NamedTuple):
    """product: takes numbers alone, in the order of `_product`; part: the address of the code that each
    thread runs

    dtype: of x and y
    """

    product: Callable[..., int]
    part: int
    dtype: torch.dtype


def matmul(x: Tensor, codes: Tensor, scales: Tensor, group_size: int, compiled: Kernel) -> Tensor:
    """Multiply x [M, K], contiguous, in the kernel's dtype, to [M, N'] in that dtype."""
    m, k = x.shape
    n = codes.shape[0] * BLOCK
    y = x.new_empty(m, n)
    parallel = gomp_parallel() if n * k * (m + 1) >= ALONE else 0
    compiled.product(
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), y.data_ptr(), m, n, k, group_size,
        compiled.part, parallel, torch.get_num_threads(),
    )  # fmt: skip
    return y


@functools.cache
def instructions_for(dtype: torch.dtype) -> Instructions:
    """Return the best vector instructions of this CPU, or of NUMBA_CPU_FEATURES, for activations of a
    dtype.
    """
    forced = config.CPU_FEATURES  # type: ignore[attr-defined]
    has = (get_host_cpu_features() if forced is None else forced).split(",")
    if "+avx512f" not in has or "+avx512bw" not in has:
        return Instructions.PORTABLE
    multiplies_bfloat16 = dtype == torch.bfloat16 and "+avx512bf16" in has
    return Instructions.BF16 if multiplies_bfloat16 else Instructions.AVX512


@functools.cache
def kernel(instructions: Instructions, wide: bool) -> Kernel:
    """Return the compiled kernel; compiling takes a few seconds the first time. wide: with scales of
    float32
    """
    part = _part(_sources(), instructions, int(wide))
    signature = types.void(types.int64)
    try:
        compiled = cfunc(signature, error_model="numpy", cache=True)(part)
    except RuntimeError:
        # No folder can be written to.
        compiled = cfunc(signature, error_model="numpy")(part)
    product = njit(nogil=True, error_model="numpy")(
        _product(_sources(), int(instructions == Instructions.BF16))
    )
    with contextlib.suppress(RuntimeError):
        product.enable_caching()
    product.compile((types.int64,) * 11)
    product.disable_compile()
    dtype = torch.bfloat16 if instructions is Instructions.BF16 else torch.float32
    return Kernel(product, compiled.address or 0, dtype)


@functools.cache
def _sources() -> str:
    """numba's cache checks only a kernel's own file and its closure, so this digest is part of the
    closure.
    """
    files = (Path(str(module.__file__)).read_bytes() for module in (int4_packing, int4_tile, vectors))
    return hashlib.sha256(b"".join(files)).hexdigest()


def _product(sources: str, is_bfloat16: int) -> Callable[..., int]:
    size = 2 if is_bfloat16 else 4

    def product(
        x: int, codes: int, scales: int, y: int, m: int, n: int, k: int, group_size: int,
        part: int, parallel: int, threads: int,
    ) -> int:  # fmt: skip
        """Arguments x, codes, scales, y, part, parallel are addresses."""
        _ = sources
        groups = k // group_size
        sums = np.empty(m * groups, np.float32)
        for group in range(m * groups):
            sums[group] = total(x + group * group_size * size, group_size, is_bfloat16)
        task = np.empty(10, np.int64)
        task[0], task[1], task[2], task[3], task[4] = 0, x, codes, scales, sums.ctypes.data
        task[5], task[6], task[7], task[8], task[9] = y, m, n, k, group_size
        run(parallel, threads, part, task.ctypes.data)
        # numba frees an array after its last mention, and addresses do not count.
        return len(sums) + len(task)

    return product


def _part(sources: str, kind: Instructions, wide: int) -> Callable[[int], None]:
    instructions = int(kind)
    tiles_of_1, tiles_of_2, tiles_of_4 = (tiles_at_once(kind, rows) for rows in ROWS)
    size = 2 if kind == Instructions.BF16 else 4
    scale_bytes = BYTES * (2 if wide else 1)
    vectors_of_sums = max(rows * TILES for rows in ROWS)

    def part(task: Any) -> None:
        """Compute blocks of the product until all are taken. task: address of `_product`'s numbers"""
        _ = sources
        x, codes, scales = number_at(task, 1), number_at(task, 2), number_at(task, 3)
        sums, y = number_at(task, 4), number_at(task, 5)
        m, n, k, group_size = number_at(task, 6), number_at(task, 7), number_at(task, 8), number_at(task, 9)
        groups, words = k // group_size, group_size // COLUMNS
        x_row, sums_row, y_row = k * size, groups * 4, n * size
        codes_block, scales_block = k // COLUMNS * TILES * BYTES, groups * TILES * scale_bytes
        scratch = room(vectors_of_sums)
        while True:
            block = take_number(task)
            if block >= n // BLOCK:
                break
            row = 0
            while row < m:
                left = m - row
                rows_x, rows_sums, rows_y = x + row * x_row, sums + row * sums_row, y + row * y_row
                rows_y += block * BLOCK * size
                at_codes, at_scales = codes + block * codes_block, scales + block * scales_block
                if left == 1:
                    for tile in range(0, TILES, tiles_of_1):
                        multiply(
                            rows_x, x_row, left, at_codes + tile * BYTES, at_scales + tile * scale_bytes,
                            rows_sums, sums_row, rows_y + tile * 16 * size, y_row, groups, words, scratch,
                            instructions, 1, tiles_of_1, wide,
                        )  # fmt: skip
                elif left == 2:
                    for tile in range(0, TILES, tiles_of_2):
                        multiply(
                            rows_x, x_row, left, at_codes + tile * BYTES, at_scales + tile * scale_bytes,
                            rows_sums, sums_row, rows_y + tile * 16 * size, y_row, groups, words, scratch,
                            instructions, 2, tiles_of_2, wide,
                        )  # fmt: skip
                else:
                    for tile in range(0, TILES, tiles_of_4):
                        multiply(
                            rows_x, x_row, left, at_codes + tile * BYTES, at_scales + tile * scale_bytes,
                            rows_sums, sums_row, rows_y + tile * 16 * size, y_row, groups, words, scratch,
                            instructions, 4, tiles_of_4, wide,
                        )  # fmt: skip
                row += 4

    return part
