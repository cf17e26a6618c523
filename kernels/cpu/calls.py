"""Compiled calls that run one after another, without Python between them: a list of them is a model's step.

    call     int64 [2]: the addresses of a function and of its numbers
    numbers  int64 [n]: the address of the step's numbers, then what this call reads
    step     int64 [StepNumber and places]: what differs from step to step; all calls share it

So the calls stay as they are, and before a step only the step's numbers are written. A tensor that calls hand
on is known to them by its place among the step's numbers, where its address is. `call_list.py` puts lists in
memory, and `run_calls.py` runs them.
"""

import enum
from typing import NamedTuple


class StepNumber(enum.IntEnum):
    """The first numbers of a step. Addresses of tensors follow."""

    ROWS = 0
    THREADS = 1
    PARALLEL = 2
    """Address of GOMP_parallel; 0 without it."""
    POSITIONS = 3
    """Address of each row's position, int64 [rows]."""
    COS = 4
    """Address of the cosines of each position, [positions, D]."""
    SIN = 5
    TABLE = 6
    """Address of the block table, int32 [rows, W]; row b lists, in order, the pages of request b."""
    TABLE_STRIDE = 7
    LENGTHS = 8
    """Address of each request's length, int32 [rows]."""
    TOKENS = 9
    """Address of each row's token, int64 [rows]."""


class Call(NamedTuple):
    function: int
    """The address of code that takes the address of numbers, int64, and returns nothing."""
    numbers: tuple[int | float, ...]
    """What the function reads, after the address of the step's numbers."""
