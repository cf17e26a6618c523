"""Runs lists of compiled calls (`calls.py`), and compiles the functions that such calls name, by numba."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from numba import cfunc, njit, types

from .vectors import number_at, run


def compiled_function(function: Callable[[Any], None]) -> int:
    """Compile a function of one address; return its own. The compiled code is kept on disk if possible."""
    signature = types.void(types.int64)
    try:
        compiled = cfunc(signature, error_model="numpy", cache=True)(function)
    except RuntimeError:
        # No folder can be written to.
        compiled = cfunc(signature, error_model="numpy")(function)
    _KEPT.append(compiled)
    return compiled.address or 0


_KEPT: list[Any] = []
"""Compiled functions, whose addresses are used until the process ends."""


@functools.cache
def run_calls() -> Callable[[int, int], None]:
    """Return the compiled function that runs `count` calls at an address, without the interpreter's lock."""
    compiled = njit(nogil=True, error_model="numpy")(_run_calls)
    # Raised where no folder can be written to.
    with contextlib.suppress(RuntimeError):
        compiled.enable_caching()
    compiled.compile((types.int64, types.int64))
    compiled.disable_compile()
    return compiled


def _run_calls(calls: int, count: int) -> None:
    for index in range(count):
        run(0, 1, number_at(calls, 2 * index), number_at(calls, 2 * index + 1))
