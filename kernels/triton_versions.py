"""Names that differ between Triton 3.6 and 3.9; no other file depends on Triton's version.

| here             | 3.6, 3.7                          | 3.8                | 3.9               |
|------------------|-----------------------------------|--------------------|-------------------|
| `thread_barrier` | `gl.thread_barrier`, `gl.barrier` | `gl.barrier`       | `gl.barrier`      |
| `reinterpret`    | `memory._reinterpret`             | `._reinterpret`    | `.reinterpret`    |
| `tma_load`       | `tma.async_copy_global_to_shared` | `tma.async_load`   | `tma.async_load`  |
| `tma_store`      | `tma.async_copy_shared_to_global` | `tma.async_store`  | `tma.async_store` |
| `WHOLE_VIEWS`    | no                                | yes                | no                |
| `SCALES_ON_12_1` | no                                | no                 | yes               |
| `FOUR_IN_A_ROW`  | yes                               | no                 | no                |

This module is for `triton_imports.py` alone; it is empty if Triton is not installed.
"""

import os
from typing import Any

# From 3.9 on Triton warns that 3.10 will not fuse products and sums by itself; our kernels were tested fused.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def first_of(owner: Any, *names: str) -> Any:
    """Return the first attribute that `owner` has."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


try:
    import triton
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import tma
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
else:
    thread_barrier = first_of(gl, "barrier", "thread_barrier")
    tma_load = first_of(tma, "async_load", "async_copy_global_to_shared")
    tma_store = first_of(tma, "async_store", "async_copy_shared_to_global")
    reinterpret = first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
    """Called as `reinterpret(memory, dtype, shape, layout)`: a view of an allocation, or of a part of one
    that `index` gave. It is no larger than that, and with WHOLE_VIEWS just as large."""
    _VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
    WHOLE_VIEWS = _VERSION == (3, 8)
    FOUR_IN_A_ROW = _VERSION < (3, 8)
    """Whether a lane has four columns in a row of mma.sync's operand that is decoded from words; else two."""
    SCALES_ON_12_1 = _VERSION >= (3, 9)
    """Whether `tl.dot_scaled` takes NVFP4 on compute capability 12.1."""
