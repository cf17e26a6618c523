"""Rows of a table, such as the embeddings of tokens, as one of a list of compiled calls; in numba.

    table  [N, D], D a multiple of 8 bytes        out  [rows, D]  =  table[tokens]

Nothing checks the tokens: the engine refuses others than the vocabulary's.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray
from torch import Tensor

from . import calls, vectors
from .calls import Call, StepNumber
from .run_calls import compiled_function
from .vectors import number_at, pointer

ROWS, TOKENS = int(StepNumber.ROWS), int(StepNumber.TOKENS)
WORD = np.int64(0)


def gather_call(table: Tensor, out: int) -> Call:
    """table: contiguous; has to be kept. out: a place in the step's numbers"""
    words = table.shape[1] * table.element_size() // WORD.itemsize
    return Call(_function(), (table.data_ptr(), out, words))


def serves(table: Tensor) -> bool:
    whole = table.shape[1] * table.element_size() % WORD.itemsize == 0
    return whole and table.is_contiguous() and table.device.type == "cpu"


@functools.cache
def _function() -> int:
    files = (Path(str(path)).read_bytes() for path in (__file__, calls.__file__, vectors.__file__))
    return compiled_function(_gather(hashlib.sha256(b"".join(files)).hexdigest()))


def _gather(sources: str) -> Callable[[Any], None]:
    """sources: a digest of all source code that is compiled into the kernel, since numba's cache looks at
    this file alone
    """

    def gather(numbers: Any) -> None:
        """numbers: the step's, then those of `gather_call`"""
        _ = sources
        step, words = number_at(numbers, 0), number_at(numbers, 3)
        table = carray(pointer(number_at(numbers, 1), WORD), words)
        out = carray(pointer(number_at(step, number_at(numbers, 2)), WORD), words)
        for row in range(number_at(step, ROWS)):
            token = number_at(number_at(step, TOKENS), row)
            for word in range(words):
                out[row * words + word] = table[token * words + word]

    return gather
