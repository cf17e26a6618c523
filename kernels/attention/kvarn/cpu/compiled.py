"""The CPU kernels of KVarN, compiled for a model's dtype before anything is served.

Not for what they compute, which is in `kvarn_decode_cpu.py` and `kvarn_pages_cpu.py`. Signatures are given,
so nothing else is ever compiled: other arguments are an error. What was compiled stays on disk, beside the
source or in the user's cache folder, where either can be written to.
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
from torch import Tensor

from .. import reference as kvarn
from . import decode as kvarn_decode_cpu
from . import lanes
from . import pages as kvarn_pages_cpu
from . import tile as kvarn_tile_cpu

MODULES = (kvarn, kvarn_decode_cpu, kvarn_pages_cpu, kvarn_tile_cpu, lanes)
NUMBERS = {torch.float32: types.float32, torch.bfloat16: types.int16, torch.float16: types.uint16}
AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.uint16}
Kernel = Callable[..., None]


class Kernels(NamedTuple):
    """As their modules say, each of one dtype of keys and values."""

    decode: Kernel
    code_page: Kernel
    read_pages: Kernel


@functools.cache
def kernels(dtype: torch.dtype) -> Kernels:
    """dtype: float32, bfloat16 or float16"""
    number, at = NUMBERS[dtype], types.int64
    pages = [*[_array(types.int16, 4)] * 2, *[_array(types.uint16, 4)] * 2]
    tokens, flat, step = _array(number, 3), _array(number, 1), _array(types.int64, 1)
    table, sinks, factor = _array(types.int32, 2), _array(types.float32, 1), types.float64
    decode = [*[tokens] * 4, _array(number, 6), *pages, table, *[step] * 3, at, at, factor, factor, sinks]
    return Kernels(
        _compiled(kvarn_decode_cpu.decode, decode),
        _compiled(kvarn_pages_cpu.code_page, [flat, flat, *[at] * 5, *pages]),
        _compiled(kvarn_pages_cpu.read_pages, [_array(types.int32, 1), tokens, tokens, *pages]),
    )


def numbers(x: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor as kernels take it."""
    return (x.view(AS_INTEGERS[x.dtype]) if x.dtype in AS_INTEGERS else x).numpy()


def _array(number: Any, dimensions: int) -> types.Array:
    return types.Array(number, dimensions, "C")


def _compiled(kernel: Callable[[str], Kernel], signature: list[Any]) -> Kernel:
    compiled = njit(nogil=True, error_model="numpy")(kernel(_sources()))
    # Raised where no folder can be written to.
    with contextlib.suppress(RuntimeError):
        compiled.enable_caching()
    compiled.compile(tuple(signature))
    compiled.disable_compile()
    return compiled


@functools.cache
def _sources() -> str:
    """Of a kernel's sources numba's cache looks at its own file and at its closure; so this is put there."""
    files = (Path(str(module.__file__)).read_bytes() for module in MODULES)
    return hashlib.sha256(b"".join(files)).hexdigest()
