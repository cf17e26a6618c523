"""Bounds on what Triton makes of a kernel, for each version that torch 2.11 to 2.15 bring.

Kernels were tuned and timed on 3.6, whose bounds say what they need. The others record what a version makes
of the same source, so that it gets no worse unseen; where that is more, the test says what it is more of.
"""

from typing import TypeVar

import triton

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
Bound = TypeVar("Bound", int, float)


def bound(on_3_6: Bound, on_3_7: Bound, on_3_8: Bound, on_3_9: Bound) -> Bound:
    """The installed version's; a later one's is that of 3.9."""
    return on_3_6 if VERSION <= (3, 6) else {(3, 7): on_3_7, (3, 8): on_3_8}.get(VERSION, on_3_9)
