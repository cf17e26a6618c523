"""Products by coded weights on a CPU, compiled by numba: blocks of 64 rows of the weight, on torch's threads.

The product reads four or eight bits per weight and multiplies as described in `coded_tile.py`. A thread takes
another block when it has finished one, so a thread that the system interrupts costs only a block's time.
Signatures are fixed: nothing compiles after `kernel`. Compiled code is kept on disk, beside the source or in
the user's cache folder.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, types
from numba.core import config
from numba.core.codegen import get_host_cpu_features
from torch import Tensor

from . import amx, calls, code_packing, coded_tile, vectors
from .amx import BAND, FROM_ROWS, configure, multiply_band, release
from .calls import Call, StepNumber
from .code_packing import BLOCK, TILES, Codes, PackedCodes, Scales
from .coded_tile import PANEL_FROM, Instructions, Kind, clear, decode, multiply, store_rows, total
from .openmp import gomp_parallel
from .run_calls import compiled_function
from .vectors import BYTES, number_at, room, run, take_number

ALONE = 1 << 20
"""Products and weights, counted together, below which a second thread costs more than it saves."""
PANEL_COLUMNS = 128
"""Columns that are decoded at once; panels and the x beside them stay in a core's first cache."""
PANEL_ROWS, AMX_PANEL_ROWS = 64, 256
"""Rows of x that are multiplied by a panel; their totals lie on the stack."""


ROWS, THREADS, PARALLEL = map(int, (StepNumber.ROWS, StepNumber.THREADS, StepNumber.PARALLEL))


class Kernel(NamedTuple):
    """product: takes numbers alone, in the order of `_product`; call: the address of the code that does the
    same as one of a list of calls; part: the address of the code that each thread runs

    dtype: of x and y
    """

    product: Callable[..., int]
    call: int
    part: int
    dtype: torch.dtype


def matmul(x: Tensor, packed: PackedCodes, group_size: int, compiled: Kernel) -> Tensor:
    """Multiply x [M, K], contiguous, in the kernel's dtype, to [M, N'] in that dtype."""
    return product_by(packed, x.shape[1], group_size, compiled)(x)


def product_by(packed: PackedCodes, k: int, group_size: int, compiled: Kernel) -> Callable[[Tensor], Tensor]:
    """Return `matmul` by one weight, which looks up only what differs from call to call."""
    weight = packed.codes.data_ptr(), packed.scales.data_ptr(), packed.factor.data_ptr()
    n = packed.codes.shape[0] * BLOCK
    sizes = n, k, group_size, compiled.part
    product, gomp = compiled.product, gomp_parallel()

    def multiply(x: Tensor) -> Tensor:
        _ = packed  # whose memory is read
        m = x.shape[0]
        y = x.new_empty(m, n)
        parallel = gomp if n * k * (m + 1) >= ALONE else 0
        product(x.data_ptr(), *weight, y.data_ptr(), m, *sizes, parallel, torch.get_num_threads())
        return y

    return multiply


def product_call(packed: PackedCodes, k: int, group_size: int, compiled: Kernel, x: int, y: int) -> Call:
    """Return the call that multiplies x [T, K] to y [T, N'], both in the kernel's dtype and contiguous.

    x, y: places in the step's numbers. The packed tensors have to be kept.
    """
    weight = packed.codes.data_ptr(), packed.scales.data_ptr(), packed.factor.data_ptr()
    sizes = packed.codes.shape[0] * BLOCK, k, group_size
    return Call(compiled.call, (x, *weight, y, *sizes, compiled.part))


@functools.cache
def has_amx() -> bool:
    """Whether this process may multiply bfloat16 by AMX: the system is asked for it, as it demands."""
    features = get_host_cpu_features().split(",")
    return "+amx-bf16" in features and "+avx512bf16" in features and torch.cpu._init_amx()


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
def kernel(instructions: Instructions, codes: Codes, scales: Scales) -> Kernel:
    """Return the compiled kernel; compiling takes a few seconds the first time."""
    kind = Kind(instructions, codes, scales)
    part = _part(sources(), *map(int, kind))
    form = sources(), int(kind.pairs), int(scales.has_zero)
    product = njit(nogil=True, error_model="numpy")(_product(*form))
    with contextlib.suppress(RuntimeError):
        product.enable_caching()
    product.compile((types.int64,) * 12)
    product.disable_compile()
    dtype = torch.bfloat16 if kind.pairs else torch.float32
    return Kernel(product, compiled_function(_call(*form)), compiled_function(part), dtype)


@functools.cache
def sources() -> str:
    """numba's cache checks only a kernel's own file and its closure, so this digest is part of the
    closure.
    """
    files = (
        Path(str(module.__file__)).read_bytes() for module in (amx, calls, code_packing, coded_tile, vectors)
    )
    return hashlib.sha256(b"".join(files)).hexdigest()


@njit(error_model="numpy")
def _multiply(
    x: int, codes: int, scales: int, factor: int, y: int, m: int, n: int, k: int, group_size: int,
    part: int, parallel: int, threads: int, is_bfloat16: int, has_zero: int,
) -> int:  # fmt: skip
    """Arguments x, codes, scales, factor, y, part, parallel are addresses."""
    # Without zero points nobody reads sums.
    groups = k // group_size if has_zero else 0
    sums = np.empty(m * groups, np.float32)
    for group in range(m * groups):
        if is_bfloat16:
            sums[group] = total(x + group * group_size * 2, group_size, 1)
        else:
            sums[group] = total(x + group * group_size * 4, group_size, 0)
    task = np.empty(11, np.int64)
    task[0], task[1], task[2], task[3], task[4] = 0, x, codes, scales, sums.ctypes.data
    task[5], task[6], task[7], task[8], task[9], task[10] = y, m, n, k, group_size, factor
    run(parallel, threads, part, task.ctypes.data)
    # numba frees an array after its last mention, and addresses do not count.
    return len(sums) + len(task)


def _product(sources: str, is_bfloat16: int, has_zero: int) -> Callable[..., int]:
    def product(
        x: int, codes: int, scales: int, factor: int, y: int, m: int, n: int, k: int, group_size: int,
        part: int, parallel: int, threads: int,
    ) -> int:  # fmt: skip
        """Arguments x, codes, scales, factor, y, part, parallel are addresses."""
        _ = sources
        return _multiply(
            x, codes, scales, factor, y, m, n, k, group_size, part, parallel, threads, is_bfloat16, has_zero
        )

    return product


def _call(sources: str, is_bfloat16: int, has_zero: int) -> Callable[[Any], None]:
    def call(numbers: Any) -> None:
        """numbers: the step's, then those of `product_call`"""
        _ = sources
        step, m = number_at(numbers, 0), number_at(number_at(numbers, 0), ROWS)
        n, k = number_at(numbers, 6), number_at(numbers, 7)
        parallel = number_at(step, PARALLEL) if n * k * (m + 1) >= ALONE else 0
        _multiply(
            number_at(step, number_at(numbers, 1)), number_at(numbers, 2), number_at(numbers, 3),
            number_at(numbers, 4), number_at(step, number_at(numbers, 5)), m, n, k, number_at(numbers, 8),
            number_at(numbers, 9), parallel, number_at(step, THREADS), is_bfloat16, has_zero,
        )  # fmt: skip

    return call


def _part(sources: str, instructions: int, codes_kind: int, scales_kind: int) -> Callable[[int], None]:
    kind = Kind(Instructions(instructions), Codes(codes_kind), Scales(scales_kind))
    size, columns, scale_bytes = kind.number_bytes, kind.codes.columns, kind.scale_bytes
    groups_of_a_scale = 2 if kind.scales is Scales.PAIRS else 1
    panel_vectors = PANEL_COLUMNS * TILES * size // 4
    with_amx = kind.instructions is Instructions.AMX
    panel_rows = AMX_PANEL_ROWS if with_amx else PANEL_ROWS
    total_vectors, band_vectors = panel_rows * TILES, BAND * TILES
    panel_from = FROM_ROWS - 1 if with_amx else PANEL_FROM.get(kind.codes, 0)
    amx_rows = FROM_ROWS if with_amx else 1 << 62
    word_of_panel = kind.steps * TILES * BYTES
    four_rows = 4 * TILES * BYTES

    def part(task: Any) -> None:
        """Compute blocks of the product until all are taken. task: address of `_product`'s numbers"""
        _ = sources
        x, codes, scales = number_at(task, 1), number_at(task, 2), number_at(task, 3)
        sums, y, factor = number_at(task, 4), number_at(task, 5), number_at(task, 10)
        m, n, k, group_size = number_at(task, 6), number_at(task, 7), number_at(task, 8), number_at(task, 9)
        groups, words, all_words = -(-k // group_size), group_size // columns, k // columns
        x_row, sums_row, y_row = k * size, groups * 4, n * size
        codes_block = all_words * TILES * BYTES
        scales_block = -(-groups // groups_of_a_scale) * TILES * scale_bytes
        at_once = PANEL_COLUMNS // group_size
        use_panels = panel_from > 0 and at_once > 0 and m > panel_from
        totals, panel, band_sums = room(total_vectors), room(panel_vectors), room(band_vectors)
        use_tiles = use_panels and m >= amx_rows
        # Of tiles, as they are configured now.
        tile_rows = 0
        while True:
            block = take_number(task)
            if block >= n // BLOCK:
                break
            block_codes, block_scales = codes + block * codes_block, scales + block * scales_block
            row = 0
            while row < m:
                rows_x, rows_sums = x + row * x_row, sums + row * sums_row
                rows_y = y + row * y_row + block * BLOCK * size
                rows = min(m - row, panel_rows if use_panels else 4)
                quads = (rows + 3) // 4
                clear(totals, quads * 4 * TILES)
                if rows == 1:
                    multiply(
                        rows_x, x_row, rows, block_codes, block_scales, rows_sums, sums_row, totals,
                        0, groups, words, all_words, instructions, codes_kind, scales_kind, 1, 0,
                    )  # fmt: skip
                    store_rows(
                        totals, factor, rows_y, y_row, rows, instructions, codes_kind, scales_kind, 1, 0
                    )
                elif rows == 2:
                    multiply(
                        rows_x, x_row, rows, block_codes, block_scales, rows_sums, sums_row, totals,
                        0, groups, words, all_words, instructions, codes_kind, scales_kind, 2, 0,
                    )  # fmt: skip
                    store_rows(
                        totals, factor, rows_y, y_row, rows, instructions, codes_kind, scales_kind, 2, 0
                    )
                elif rows <= 4 and not use_tiles:
                    multiply(
                        rows_x, x_row, rows, block_codes, block_scales, rows_sums, sums_row, totals,
                        0, groups, words, all_words, instructions, codes_kind, scales_kind, 4, 0,
                    )  # fmt: skip
                    store_rows(
                        totals, factor, rows_y, y_row, rows, instructions, codes_kind, scales_kind, 4, 0
                    )
                else:
                    group = 0
                    while group < groups:
                        end = min(groups, group + at_once)
                        first = group * words
                        decode(
                            block_codes + first * TILES * BYTES, min(end * words, all_words) - first, panel,
                            instructions, codes_kind, scales_kind,
                        )  # fmt: skip
                        for band in range((rows + BAND - 1) // BAND if use_tiles else 0):
                            count = min(BAND, rows - band * BAND)
                            if count != tile_rows:
                                configure(count, instructions, codes_kind)
                                tile_rows = count
                            for at in range(group, end):
                                place = at * words
                                multiply_band(
                                    rows_x + band * BAND * x_row + place * columns * size, x_row, count,
                                    panel + (place - first) * word_of_panel,
                                    min(words, all_words - place) * columns, block_scales,
                                    rows_sums + band * BAND * sums_row, sums_row,
                                    totals + band * BAND * TILES * BYTES, at, band_sums,
                                    instructions, codes_kind, scales_kind,
                                )  # fmt: skip
                        for quad in range(0 if use_tiles else quads):
                            multiply(
                                rows_x + quad * 4 * x_row, x_row, rows - quad * 4, panel, block_scales,
                                rows_sums + quad * 4 * sums_row, sums_row, totals + quad * four_rows,
                                group, end, words, all_words, instructions, codes_kind, scales_kind, 4, 1,
                            )  # fmt: skip
                        group = end
                    for quad in range(quads):
                        store_rows(
                            totals + quad * four_rows, factor, rows_y + quad * 4 * y_row, y_row,
                            rows - quad * 4, instructions, codes_kind, scales_kind, 4, 1,
                        )  # fmt: skip
                row += rows
        if tile_rows:
            release(instructions)

    return part
