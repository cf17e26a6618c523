"""A higher threshold for Python's garbage collector, so that processes start faster.

Importing torch and transformers creates a million objects that stay. With Python's default threshold of 700
new objects, collecting again and again takes a tenth of a process's start.
"""

import gc

NEW_OBJECTS = 10_000
"""Collecting so many takes a few tenths of a millisecond. Higher thresholds saved no more time."""


def search_rarely() -> None:
    """Raise the threshold for this process. Call this only in processes that Scalegate starts, never in a
    process of a library's user.
    """
    gc.set_threshold(NEW_OBJECTS)
