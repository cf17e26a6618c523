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
from numba import njit, types

from ..kvarn.cpu import decode as kvarn_decode
from ..kvarn.cpu import lanes
from ..kvarn.cpu.compiled import NUMBERS
from ..kvarn.cpu.decode import BLOCK, LEAST_ROW, Queries, add_block, score_block, soften
from ..kvarn.cpu.lanes import WIDTH, load, splat, store
from ..kvarn.cpu.tile import ZERO

Kernel = Callable[..., None]


@functools.cache
def decode_kernel(dtype: torch.dtype) -> Kernel:
    """Return `decode` compiled for one dtype; the compiled code is kept on disk. Arguments of other types are
    an error.
    """
    number = NUMBERS[dtype]
    flat, strided = types.Array(number, 1, "C"), types.Array(number, 3, "A")
    pages, lengths = types.Array(number, 4, "C"), types.Array(types.int32, 1, "C")
    table, sinks = types.Array(types.int32, 2, "A"), types.Array(types.float32, 1, "C")
    at, factor = types.int64, types.float64
    signature = (
        flat,
        strided,
        strided,
        flat,
        pages,
        pages,
        table,
        lengths,
        at,
        at,
        at,
        factor,
        factor,
        sinks,
    )
    compiled = njit(nogil=True, error_model="numpy")(_decode(_sources()))
    # Raised where no folder can be written to.
    with contextlib.suppress(RuntimeError):
        compiled.enable_caching()
    compiled.compile(signature)
    compiled.disable_compile()
    return compiled


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


def _decode(sources: str) -> Kernel:
    """sources: a digest of all source code that is compiled into the kernel, since numba's cache looks at
    this file alone.
    """

    def decode(
        query: Any, key: Any, value: Any, out: Any, key_pages: Any, value_pages: Any,
        table: Any, lengths: Any, window: int, first_unit: int, last_unit: int,
        scale: float, cap: float, sinks: Any,
    ) -> None:  # fmt: skip
        """Store each request's new token and attend with it.

        query, out  flat, of [B, H, D] and [B, H, D_v]
        key, value  [B, H_kv, D] and [B, H_kv, D_v]
        lengths     int32 [B], of contexts, the new token counted
        window      keys that a query sees; 0 for all
        units       pairs of a request and a head of keys, of which first_unit .. last_unit are computed
        cap         of logits; 0 for none
        sinks       fp32 [H], or empty
        """
        _ = sources
        _, size, heads, dim = key_pages.shape
        value_dim = value_pages.shape[3]
        count = len(query) // (len(lengths) * heads * dim)
        row = -(-max(dim, value_dim) // LEAST_ROW) * LEAST_ROW
        flat_keys, flat_values = key_pages.reshape(-1), value_pages.reshape(-1)
        block, plain = np.zeros(BLOCK * row, np.float32), np.zeros(count * row, np.float32)
        sums = np.empty(count * row, np.float32)
        for unit in range(first_unit, last_unit):
            request, head = unit // heads, unit % heads
            length, pages = lengths[request], table[request]
            page, own = pages[(length - 1) // size], (length - 1) % size
            for d in range(dim):
                key_pages[page, own, head, d] = key[request, head, d]
            for d in range(value_dim):
                value_pages[page, own, head, d] = value[request, head, d]
            begin = max(0, length - window) if window else 0
            seen = length - begin
            room = -(-seen // WIDTH) * WIDTH
            by = splat(np.float32(scale))
            for m in range(count):
                at = ((request * heads + head) * count + m) * dim
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
                sink = sinks[head * count + m] if len(sinks) else ZERO
                soften(scores, m * room, seen, room, np.float32(cap), len(sinks) > 0, sink)
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
    files = (Path(str(path)).read_bytes() for path in (__file__, kvarn_decode.__file__, lanes.__file__))
    return hashlib.sha256(b"".join(files)).hexdigest()
