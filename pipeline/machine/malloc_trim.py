"""Returns freed memory to the system, for jobs that go through a model one layer at a time.

glibc keeps freed blocks of up to 32 MiB, and live blocks between them keep its heap from ever shrinking. If a
checkpoint is read and rounded weight by weight, the heap grows to the whole checkpoint's size.
"""

import ctypes


def return_freed_memory() -> None:
    """Give back the pages of all freed blocks; does nothing if the C library has no `malloc_trim`."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))
