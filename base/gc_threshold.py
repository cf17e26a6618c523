"""How often Python searches objects for circles that nothing else refers to.

Importing torch and transformers makes a million objects that all stay: with Python's own threshold of 700 new
ones, searching them again and again takes a tenth of a process's start.
"""

import gc

NEW_OBJECTS = 10_000
"""Some tenths of a millisecond to search; more saved nothing."""


def search_rarely() -> None:
    """From now on, in a process of our own."""
    gc.set_threshold(NEW_OBJECTS)
