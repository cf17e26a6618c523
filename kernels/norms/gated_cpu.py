"""An activation of a gate, times what it gates, on a CPU; in numba.

    gate_up  [rows, 2 * D], the gate first        out  [rows, D]  =  round(table[gate] * up)

A number of 16 bits has 65536 values, so a table holds what torch's activation gives for each. The bits are
torch's.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ..attention.kvarn.cpu import lanes
from ..attention.kvarn.cpu.compiled import NUMBERS
from ..attention.kvarn.cpu.lanes import WIDTH, load, store
from ..cpu import calls, vectors
from ..cpu.calls import Call, StepNumber
from ..cpu.run_calls import compiled_function
from ..cpu.vectors import number_at, pointer

VALUES, ROW = 1 << 16, 1 << 9
DIM_MULTIPLE = 64
"""torch computes rows of this length in vectors. The rest of other rows is computed by other code, with other
bits."""
ROWS = int(StepNumber.ROWS)


def serves(dtype: torch.dtype, dim: int) -> bool:
    return dtype in NUMBERS and dtype.itemsize == 2 and dim % DIM_MULTIPLE == 0


def table_of(activation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return what an activation gives for every number of 16 bits; None if the bits depend on how the numbers
    lie, as those of torch's GELU do.
    """
    values = torch.arange(VALUES, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, ROW)
    table = activation(values).contiguous()
    of_gates = activation(torch.cat((values, values), dim=1).chunk(2, dim=1)[0]).contiguous()
    return table.flatten() if torch.equal(table.view(torch.int16), of_gates.view(torch.int16)) else None


def gated_call(gate_up: int, table: Tensor, out: int, dim: int) -> Call:
    """gate_up, out: places in the step's numbers. The table has to be kept."""
    return Call(_gated_function(table.dtype), (gate_up, table.data_ptr(), out, dim))


@functools.cache
def _gated_function(dtype: torch.dtype) -> int:
    return compiled_function(_gated(_sources(), np.dtype(str(NUMBERS[dtype])).type(0)))


def _gated(sources: str, zero: np.generic) -> Callable[[Any], None]:
    """sources: a digest of all source code that is compiled into the kernel, since numba's cache looks at
    this file alone
    zero: a number of the type that the tensors' memory is read as
    """

    def gated(numbers: Any) -> None:
        """numbers: the step's, places of gate and up and of out, between them the table's address; D"""
        _ = sources
        step, dim = number_at(numbers, 0), number_at(numbers, 4)
        size = number_at(step, ROWS) * dim
        gate_up = carray(pointer(number_at(step, number_at(numbers, 1)), zero), 2 * size)
        table = carray(pointer(number_at(numbers, 2), zero), VALUES)
        out = carray(pointer(number_at(step, number_at(numbers, 3)), zero), size)
        for row in range(0, size, dim):
            for d in range(row, row + dim):
                out[d] = table[gate_up[row + d] & (VALUES - 1)]
            for d in range(row, row + dim, WIDTH):
                store(out, d, load(out, d) * load(gate_up, row + d + dim))

    return gated


@functools.cache
def _sources() -> str:
    modules = (lanes, vectors, calls)
    files = (Path(str(path)).read_bytes() for path in (__file__, *(each.__file__ for each in modules)))
    return hashlib.sha256(b"".join(files)).hexdigest()
