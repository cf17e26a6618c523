"""Decode attention over plain pages on a CPU, with the new token stored first; in numba, without the GIL.

    key_pages    [pages, P, H_kv, D]       one layer's keys, P tokens to a page, in 16 or 32 bits
    value_pages  [pages, P, H_kv, D_v]
    table        int32 [B, W]              row b lists, in order, the pages of request b

The kernel handles one request and kv head at a time. A few tokens are widened to fp32 into a block that stays
in the nearest cache, and all query heads of the group are multiplied by it, so pages are read once and
nothing is copied. Sums have one order and do not depend on other requests. The torch reference is
`../reference.py`, which also serves prompts, eight-bit pages and heads that are no multiple of 16.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from ...cpu import calls, vectors
from ...cpu.calls import Call, StepNumber
from ...cpu.run_calls import compiled_function
from ...cpu.vectors import number_at, pointer, real_at, run, take_number
from ..kvarn.cpu import decode as kvarn_decode
from ..kvarn.cpu import lanes
from ..kvarn.cpu.compiled import NUMBERS
from ..kvarn.cpu.decode import BLOCK, LEAST_ROW, Queries, add_block, score_block, soften
from ..kvarn.cpu.lanes import WIDTH, load, splat, store
from ..kvarn.cpu.tile import ZERO

Kernel = Callable[..., None]
HEADS, KEY_DIM, VALUE_DIM = 3, 4, 5
"""Among the numbers of a layer."""
WHOLE, REAL = np.int32(0), np.float32(0)
ROWS, THREADS, PARALLEL = map(int, (StepNumber.ROWS, StepNumber.THREADS, StepNumber.PARALLEL))
TABLE, TABLE_STRIDE, LENGTHS = map(int, (StepNumber.TABLE, StepNumber.TABLE_STRIDE, StepNumber.LENGTHS))


@functools.cache
def decode_kernel(dtype: torch.dtype) -> Kernel:
    """Return `decode` compiled for one dtype; the compiled code is kept on disk.

    It takes addresses, since handing over an array costs a microsecond.
    """
    zero = np.dtype(str(NUMBERS[dtype])).type(0)
    compiled = njit(nogil=True, error_model="numpy")(_decode(_sources(), zero))
    # Raised where no folder can be written to.
    with contextlib.suppress(RuntimeError):
        compiled.enable_caching()
    compiled.compile((*(types.int64,) * 17, *(types.float64,) * 2))
    compiled.disable_compile()
    return compiled


def layer_numbers(key_pages: Tensor, value_pages: Tensor) -> np.ndarray:
    """Return what the kernel reads of a layer with these pages, [pages, P, H_kv, D], at one address."""
    _, size, heads, dim = key_pages.shape
    addresses = key_pages.data_ptr(), value_pages.data_ptr()
    return np.array((*addresses, size, heads, dim, value_pages.shape[3]), np.int64)


@njit(error_model="numpy")
def _fill(
    block: Any, pages: Any, size: int, heads: int, head: int, dim: int, table: Any, first: int, count: int,
    row: int,
) -> None:  # fmt: skip
    """Copy tokens first .. first + count of a request, from flat `pages` of `size` tokens, into the block's
    rows.
    """
    for token in range(count):
        place = table[(first + token) // size] * size + (first + token) % size
        at = (place * heads + head) * dim
        for d in range(0, dim, WIDTH):
            store(block, token * row + d, load(pages, at + d))


@njit(error_model="numpy")
def _attend(
    zero: Any, layer_at: int, query_at: int, key_at: int, value_at: int, out_at: int,
    query_stride: int, key_stride: int, value_stride: int, count: int,
    table_at: int, table_stride: int, lengths_at: int, requests: int, window: int, sinks_at: int,
    first_unit: int, last_unit: int, scale: float, cap: float,
) -> None:  # fmt: skip
    size, heads, dim = number_at(layer_at, 2), number_at(layer_at, 3), number_at(layer_at, 4)
    value_dim = number_at(layer_at, 5)
    # Only slices look at an array's length.
    flat_keys = carray(pointer(number_at(layer_at, 0), zero), size)
    flat_values = carray(pointer(number_at(layer_at, 1), zero), size)
    query, out = carray(pointer(query_at, zero), dim), carray(pointer(out_at, zero), dim)
    key, value = carray(pointer(key_at, zero), dim), carray(pointer(value_at, zero), dim)
    table = carray(pointer(table_at, WHOLE), requests * table_stride)
    lengths = carray(pointer(lengths_at, WHOLE), requests)
    sinks = carray(pointer(sinks_at, REAL), heads * count)
    row = -(-max(dim, value_dim) // LEAST_ROW) * LEAST_ROW
    block, plain = np.zeros(BLOCK * row, np.float32), np.zeros(count * row, np.float32)
    sums = np.empty(count * row, np.float32)
    for unit in range(first_unit, last_unit):
        request, head = unit // heads, unit % heads
        length, pages = lengths[request], table[request * table_stride :]
        own = pages[(length - 1) // size] * size + (length - 1) % size
        new, to = request * key_stride + head * dim, (own * heads + head) * dim
        for d in range(dim):
            flat_keys[to + d] = key[new + d]
        new, to = request * value_stride + head * value_dim, (own * heads + head) * value_dim
        for d in range(value_dim):
            flat_values[to + d] = value[new + d]
        begin = max(0, length - window) if window else 0
        seen = length - begin
        room = -(-seen // WIDTH) * WIDTH
        by = splat(np.float32(scale))
        for m in range(count):
            at = request * query_stride + (head * count + m) * dim
            for d in range(0, dim, WIDTH):
                store(plain, m * row + d, load(query, at + d) * by)
        if value_dim > dim:  # the block's columns past a key are multiplied by zero: let them be numbers
            block[:] = ZERO
        scores = np.empty(count * room, np.float32)
        queries = Queries(count, row, room, plain, plain, plain, scores, block)
        for token in range(0, seen, BLOCK):
            filled = min(BLOCK, seen - token)
            _fill(block, flat_keys, size, heads, head, dim, pages, begin + token, filled, row)
            score_block(queries, plain, filled, token)
        for m in range(count):
            sink = sinks[head * count + m] if sinks_at else ZERO
            soften(scores, m * room, seen, room, np.float32(cap), sinks_at != 0, sink)
        sums[:] = ZERO
        for token in range(0, seen, BLOCK):
            filled = min(BLOCK, seen - token)
            _fill(block, flat_values, size, heads, head, value_dim, pages, begin + token, filled, row)
            add_block(queries, filled, token, sums)
        for m in range(count):
            at = ((request * heads + head) * count + m) * value_dim
            for d in range(0, value_dim, WIDTH):
                store(out, at + d, load(sums, m * row + d))


def _decode(sources: str, zero: np.generic) -> Kernel:
    """sources: a digest of all source code that is compiled into the kernel, since numba's cache looks at
    this file alone
    zero: a number of the type that the tensors' memory is read as
    """

    def decode(
        layer_at: int, query_at: int, key_at: int, value_at: int, out_at: int,
        query_stride: int, key_stride: int, value_stride: int, count: int,
        table_at: int, table_stride: int, lengths_at: int, requests: int, window: int, sinks_at: int,
        first_unit: int, last_unit: int, scale: float, cap: float,
    ) -> None:  # fmt: skip
        """Store each request's new token and attend with it. Arguments `..._at` are addresses.

        layer       of `layer_numbers`
        query       [B, H, D], with query_stride numbers from one request's to the next
        key, value  [B, H_kv, D] and [B, H_kv, D_v], likewise
        out         [B, H, D_v], contiguous
        count       query heads to a head of keys
        table       int32 [B, W], with table_stride numbers from one row to the next
        lengths     int32 [B], of contexts, the new token counted; B is `requests`
        window      keys that a query sees; 0 for all
        sinks       fp32 [H]; 0 for none
        units       pairs of a request and a head of keys, of which first_unit .. last_unit are computed
        cap         of logits; 0 for none
        """
        _ = sources
        _attend(
            zero, layer_at, query_at, key_at, value_at, out_at, query_stride, key_stride, value_stride, count,
            table_at, table_stride, lengths_at, requests, window, sinks_at, first_unit, last_unit, scale, cap,
        )  # fmt: skip

    return decode


@dataclass(frozen=True)
class MergedHeads:
    """Rows that hold the heads of query, key and value one after another, as a merged product leaves them."""

    rows: int
    """Their place among a step's numbers."""
    output: int
    """The place of what attention gives, [B, H * D]."""
    query_heads: int
    dtype: torch.dtype


def decode_call(
    layer: np.ndarray, heads: MergedHeads, window: int, scale: float, cap: float, worth_a_thread: int
) -> Call:
    """Return the call that stores and attends as `decode` does, for heads without sinks.

    layer: of `layer_numbers`; has to be kept. window, cap: 0 for none
    worth_a_thread: keys of all requests and heads together for which one more thread is woken
    """
    call, part = _call_functions(heads.dtype)
    sizes = heads.query_heads, int(layer[HEADS]), int(layer[KEY_DIM]), int(layer[VALUE_DIM])
    places = heads.rows, heads.output
    return Call(call, (part, layer.ctypes.data, *places, *sizes, window, scale, cap, worth_a_thread))


@functools.cache
def _call_functions(dtype: torch.dtype) -> tuple[int, int]:
    """Return the addresses of the call and of what each of its threads runs."""
    zero = np.dtype(str(NUMBERS[dtype])).type(0)
    return compiled_function(_call(_sources())), compiled_function(_part(_sources(), zero))


def _call(sources: str) -> Callable[[Any], None]:
    def call(numbers: Any) -> None:
        """numbers: the step's, then those of `decode_call`"""
        _ = sources
        step, kv_heads = number_at(numbers, 0), number_at(numbers, 6)
        requests, threads = number_at(step, ROWS), number_at(step, THREADS)
        shares = min(threads, requests * kv_heads) if number_at(step, PARALLEL) else 1
        if shares > 1:
            lengths, seen = carray(pointer(number_at(step, LENGTHS), WHOLE), requests), 0
            for request in range(requests):
                seen += lengths[request]
            shares = max(1, min(shares, seen * kv_heads // number_at(numbers, 12)))
        task = np.empty(3, np.int64)
        task[0], task[1], task[2] = 0, numbers, shares
        run(number_at(step, PARALLEL) if shares > 1 else 0, shares, number_at(numbers, 1), task.ctypes.data)
        task[0] = 0  # numba frees an array after its last mention, and addresses do not count

    return call


def _part(sources: str, zero: np.generic) -> Callable[[Any], None]:
    number = zero.itemsize

    def part(task: Any) -> None:
        """Compute shares of the units until all are taken. task: address of numbers of `_call`"""
        _ = sources
        numbers, shares = number_at(task, 1), number_at(task, 2)
        step = number_at(numbers, 0)
        rows, out = number_at(step, number_at(numbers, 3)), number_at(step, number_at(numbers, 4))
        query_heads, kv_heads = number_at(numbers, 5), number_at(numbers, 6)
        dim, value_dim = number_at(numbers, 7), number_at(numbers, 8)
        keys = rows + query_heads * dim * number
        values = keys + kv_heads * dim * number
        stride = (query_heads + kv_heads) * dim + kv_heads * value_dim
        requests = number_at(step, ROWS)
        units = requests * kv_heads
        while True:
            share = take_number(task)
            if share >= shares:
                break
            _attend(
                zero, number_at(numbers, 2), rows, keys, values, out, stride, stride, stride,
                query_heads // kv_heads, number_at(step, TABLE), number_at(step, TABLE_STRIDE),
                number_at(step, LENGTHS), requests, number_at(numbers, 9), 0, units * share // shares,
                units * (share + 1) // shares, real_at(numbers, 10), real_at(numbers, 11),
            )  # fmt: skip

    return part


@functools.cache
def _sources() -> str:
    modules = (kvarn_decode, lanes, vectors, calls)
    files = (Path(str(path)).read_bytes() for path in (__file__, *(each.__file__ for each in modules)))
    return hashlib.sha256(b"".join(files)).hexdigest()
