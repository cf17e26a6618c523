"""The CPU kernels of KVarN, compiled for a model's dtype before anything is served.

The computation itself is in `decode.py` and `pages.py`. Signatures are fixed, so nothing compiles later and
any other arguments are an error. Compiled code is kept on disk, beside the source or in the user's cache
folder, whichever can be written to.
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

from .. import reference
from . import decode, lanes, pages, tile

MODULES = (reference, decode, pages, tile, lanes)
NUMBERS = {torch.float32: types.float32, torch.bfloat16: types.int16, torch.float16: types.uint16}
AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.uint16}
Kernel = Callable[..., None]


class Kernels(NamedTuple):
    """The functions of `decode.py` and `pages.py`, compiled for one dtype of keys and values."""

    decode: Kernel
    code_page: Kernel
    read_pages: Kernel


@functools.cache
def kernels(dtype: torch.dtype) -> Kernels:
    """dtype: float32, bfloat16 or float16"""
    number, at = NUMBERS[dtype], types.int64
    page_types = [*[_array(types.int16, 4)] * 2, *[_array(types.uint16, 4)] * 2]
    tokens, flat, step = _array(number, 3), _array(number, 1), _array(types.int64, 1)
    table, sinks, factor = _array(types.int32, 2), _array(types.float32, 1), types.float64
    decode_types = [
        *[tokens] * 4,
        _array(number, 6),
        *page_types,
        table,
        *[step] * 3,
        at,
        at,
        factor,
        factor,
        sinks,
    ]
    return Kernels(
        _compiled(decode.decode, decode_types),
        _compiled(pages.code_page, [flat, flat, *[at] * 5, *page_types]),
        _compiled(pages.read_pages, [_array(types.int32, 1), tokens, tokens, *page_types]),
    )


def numbers(x: Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as a flat array for kernels."""
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
    """Return a digest of the sources. It is part of each kernel's closure, because numba's cache checks only
    a kernel's own file and its closure.
    """
    files = (Path(str(module.__file__)).read_bytes() for module in MODULES)
    return hashlib.sha256(b"".join(files)).hexdigest()
