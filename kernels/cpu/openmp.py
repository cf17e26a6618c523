"""torch's own OpenMP threads, for kernels that numba compiles: no second pool is needed beside torch's.

Kernels that run on Python's threads do not need this module. libgomp, which is part of torch's wheels for
Linux, has the function; so have LLVM's and Intel's OpenMP. If torch uses another OpenMP library, a kernel
runs on the calling thread alone.
"""

import ctypes
import functools
from pathlib import Path

import torch


@functools.cache
def gomp_parallel() -> int:
    """Return the address of `GOMP_parallel(function, data, threads, flags)`, which calls function(data) on
    each thread.

    The address is 0 if torch's OpenMP does not have the function.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
