"""Products of many rows by coded weights: the weight is decoded into oneDNN's own blocks, a part of it at a
time, and oneDNN multiplies by them while they are in a cache.

oneDNN's blocks of a bfloat16 weight [N, K] are [N/W, K/2, W, 2] if K is a multiple of 32. W is 64 on a CPU
with AVX-512 and 32 on one with AMX. Nothing promises that, so `takes` looks. Decoding rounds each weight to
bfloat16 once, as `dequantize` does.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from .code_packing import BLOCK, TILES, Codes, PackedCodes, Scales
from .coded_matmul import sources
from .coded_tile import Instructions, Kind, decode_scaled
from .openmp import gomp_parallel
from .run_calls import compiled_function
from .vectors import BYTES, number_at, run, take_number

COLUMNS = 32
"""Of a block of oneDNN's, which has rows of zeros where K is no multiple of them."""
PART_BYTES = 4 << 20
"""Of decoded weights that are multiplied by at once: they stay in a core's second cache, or in the third."""


def onednn(x: Tensor, blocks: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, blocks, None, "none", [], "")


def takes(k: int) -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU, by blocks of a weight [N, k] as is said above."""
    return k % COLUMNS == 0 and _rows_of_a_block() is not None


@functools.cache
def _rows_of_a_block() -> int | None:
    """Return W; None if this oneDNN's blocks are others."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return None
    weight = torch.arange(2 * BLOCK * 96, dtype=torch.int32).remainder(251).bfloat16().view(2 * BLOCK, 96)
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    if torch.ops.mkldnn._nbytes(blocks) != weight.nbytes:
        return None
    found = np.ctypeslib.as_array(_shorts_at(torch.ops.mkldnn.data_ptr(blocks)), (weight.numel(),))
    for rows in (BLOCK, BLOCK // 2):
        expected = weight.view(-1, rows, 48, 2).transpose(1, 2).contiguous().view(torch.int16).flatten()
        if np.array_equal(found, expected.numpy()):
            return rows
    return None


def product_by(
    packed: PackedCodes, k: int, group_size: int, codes: Codes, scales: Scales
) -> Callable[[Tensor], Tensor]:
    """Return the product of x [M, K] in bfloat16, contiguous, by one weight, to [M, N'] in bfloat16."""
    decode, part = _decoder(codes, scales)
    rows = _rows_of_a_block() or BLOCK
    blocks, in_part = packed.codes.shape[0], max(1, PART_BYTES // (2 * k * BLOCK))
    of_codes, of_scales = (tensor[0].numel() * 4 for tensor in (packed.codes, packed.scales))
    gomp = gomp_parallel()

    def multiply(x: Tensor) -> Tensor:
        found = []
        for first in range(0, blocks, in_part):
            count = min(in_part, blocks - first)
            weight, address = _room_for(count * BLOCK, k)
            decode(
                packed.codes.data_ptr() + first * of_codes, packed.scales.data_ptr() + first * of_scales,
                packed.factor.data_ptr(), address, count, k, group_size, rows, part, gomp,
                torch.get_num_threads(),
            )  # fmt: skip
            found.append(onednn(x, weight))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    return multiply


@functools.cache
def _room_for(n: int, k: int) -> tuple[Tensor, int]:
    """Return a weight in oneDNN's blocks that is written anew for each product, and its address."""
    blocks = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(n, k, dtype=torch.bfloat16), None)
    return blocks, torch.ops.mkldnn.data_ptr(blocks)


def _shorts_at(address: int) -> Any:
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_int16))


@functools.cache
def _decoder(codes: Codes, scales: Scales) -> tuple[Callable[..., int], int]:
    """Return the compiled function that decodes, and the address of what each of its threads runs."""
    part = compiled_function(_part(sources(), int(codes), int(scales)))
    decode = njit(nogil=True, error_model="numpy")(_decode(sources()))
    with contextlib.suppress(RuntimeError):
        decode.enable_caching()
    decode.compile((types.int64,) * 11)
    decode.disable_compile()
    return decode, part


def _decode(of_sources: str) -> Callable[..., int]:
    def decode(
        codes: int, scales: int, factor: int, pairs: int, blocks: int, k: int, group_size: int, rows: int,
        part: int, parallel: int, threads: int,
    ) -> int:  # fmt: skip
        """Arguments codes, scales, factor, pairs, part, parallel are addresses."""
        _ = of_sources
        task = np.empty(9, np.int64)
        task[0], task[1], task[2], task[3], task[4] = 0, codes, scales, factor, pairs
        task[5], task[6], task[7], task[8] = blocks, k, group_size, rows
        run(parallel, threads, part, task.ctypes.data)
        # numba frees an array after its last mention, and addresses do not count.
        return len(task)

    return decode


def _part(of_sources: str, codes_kind: int, scales_kind: int) -> Callable[[int], None]:
    kind = Kind(Instructions.BF16, Codes(codes_kind), Scales(scales_kind))
    instructions, columns, scale_bytes = int(kind.instructions), kind.codes.columns, kind.scale_bytes
    number_bytes = kind.number_bytes
    groups_of_a_scale = 2 if kind.scales is Scales.PAIRS else 1

    def part(task: Any) -> None:
        """Decode blocks until all are taken. task: address of `_decode`'s numbers"""
        _ = of_sources
        codes, scales, factor, pairs = (
            number_at(task, 1), number_at(task, 2), number_at(task, 3), number_at(task, 4),
        )  # fmt: skip
        blocks, k, group_size, rows = (
            number_at(task, 5), number_at(task, 6), number_at(task, 7), number_at(task, 8),
        )  # fmt: skip
        column_bytes = rows * number_bytes
        half_bytes = k * column_bytes if rows < BLOCK else column_bytes
        groups, words, all_words = -(-k // group_size), group_size // columns, k // columns
        scales_block = -(-groups // groups_of_a_scale) * TILES * scale_bytes
        while True:
            block = take_number(task)
            if block >= blocks:
                break
            block_codes = codes + block * all_words * TILES * BYTES
            block_pairs = pairs + block * k * BLOCK * number_bytes
            for group in range(groups):
                first = group * words
                decode_scaled(
                    block_codes + first * TILES * BYTES, min(words, all_words - first),
                    block_pairs + first * columns * column_bytes, 2 * column_bytes, half_bytes,
                    scales + block * scales_block, group, factor, instructions, codes_kind, scales_kind,
                )  # fmt: skip

    return part
