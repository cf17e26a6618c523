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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from ...cpu import vectors
from ...cpu.vectors import number_at, pointer
from ..kvarn.cpu import decode as kvarn_decode
from ..kvarn.cpu import lanes
from ..kvarn.cpu.compiled import NUMBERS
from ..kvarn.cpu.decode import BLOCK, LEAST_ROW, Queries, add_block, score_block, soften
from ..kvarn.cpu.lanes import WIDTH, load, splat, store
from ..kvarn.cpu.tile import ZERO

Kernel = Callable[..., None]


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


def _decode(sources: str, zero: np.generic) -> Kernel:
    """sources: a digest of all source code that is compiled into the kernel, since numba's cache looks at
    this file alone
    zero: a number of the type that the tensors' memory is read as
    """
    whole, real = np.int32(0), np.float32(0)

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
        size, heads, dim = number_at(layer_at, 2), number_at(layer_at, 3), number_at(layer_at, 4)
        value_dim = number_at(layer_at, 5)
        # Only slices look at an array's length.
        flat_keys = carray(pointer(number_at(layer_at, 0), zero), size)
        flat_values = carray(pointer(number_at(layer_at, 1), zero), size)
        query, out = carray(pointer(query_at, zero), dim), carray(pointer(out_at, zero), dim)
        key, value = carray(pointer(key_at, zero), dim), carray(pointer(value_at, zero), dim)
        table = carray(pointer(table_at, whole), requests * table_stride)
        lengths = carray(pointer(lengths_at, whole), requests)
        sinks = carray(pointer(sinks_at, real), heads * count)
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

    return decode


@functools.cache
def _sources() -> str:
    modules = (kvarn_decode, lanes, vectors)
    files = (Path(str(path)).read_bytes() for path in (__file__, *(each.__file__ for each in modules)))
    return hashlib.sha256(b"".join(files)).hexdigest()
