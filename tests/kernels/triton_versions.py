"""Bounds on what Triton makes of a kernel, for each of the two versions that torch 2.11 to 2.13 bring.

Kernels were tuned and timed on 3.6, whose bounds say what they need. Those of 3.7 record what it makes of the
same source, with more barriers and spills in three kernels: it has not been timed on a GPU.
"""

from typing import TypeVar

import triton

IS_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
Bound = TypeVar("Bound", int, float)


def bound(on_3_6: Bound, on_3_7: Bound) -> Bound:
    return on_3_7 if IS_3_7 else on_3_6
