"""Returns freed memory to the system, for jobs that go through a model one layer at a time.

glibc keeps freed blocks of up to 32 MiB, and what stays alive between them keeps it from ever shrinking its
heap by itself: of a checkpoint that is read and rounded weight by weight, that is as much as all of it.
"""

import ctypes


def return_freed_memory() -> None:
    """Give back the pages of all freed blocks; nothing where the C library has no `malloc_trim`."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))
