"""Rotary embedding on a CPU, with the norms of query and key heads before it, in place; in numba.

    x    [rows, q_heads + k_heads, D], as a merged product leaves it: other numbers may follow in each row
    cos  [positions, D], sin likewise

    x[:D/2], x[D/2:]  =  x[:D/2] * cos[:D/2] - x[D/2:] * sin[:D/2],  x[D/2:] * cos[D/2:] + x[:D/2] * sin[D/2:]

Every product and every sum is rounded to the dtype, as in transformers, so the bits are the same.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit

from ..attention.kvarn.cpu import lanes
from ..attention.kvarn.cpu.compiled import NUMBERS
from ..attention.kvarn.cpu.lanes import WIDTH, load, store
from ..cpu import calls, vectors
from ..cpu.calls import Call, StepNumber
from ..cpu.run_calls import compiled_function
from ..cpu.vectors import number_at, pointer, real_at
from . import rms_norm_cpu
from .rms_norm_cpu import norm_row

ROWS, POSITIONS, COS, SIN = map(int, (StepNumber.ROWS, StepNumber.POSITIONS, StepNumber.COS, StepNumber.SIN))


class HeadNorm(NamedTuple):
    """weight: the address of the norm's weight [D]; 0 for heads without a norm."""

    weight: int = 0
    eps: float = 0.0


@dataclass(frozen=True)
class Heads:
    """The heads of query and key of a row. Other numbers may follow them, up to `stride`."""

    stride: int
    queries: int
    keys: int
    dim: int


def rotate_call(x: int, heads: Heads, q_norm: HeadNorm, k_norm: HeadNorm, dtype: torch.dtype) -> Call:
    """x: a place in the step's numbers. `rms_norm_cpu` has to serve the heads."""
    numbers = x, heads.stride, heads.queries, heads.keys, heads.dim
    return Call(_rotate_function(dtype), (*numbers, q_norm.weight, k_norm.weight, q_norm.eps, k_norm.eps))


@functools.cache
def _rotate_function(dtype: torch.dtype) -> int:
    return compiled_function(_rotate_heads(_sources(), np.dtype(str(NUMBERS[dtype])).type(0)))


@njit(error_model="numpy")
def _rounded(scratch: Any, number: Any) -> Any:
    """Round lanes to the dtype of scratch, an array of 16 numbers."""
    store(scratch, 0, number)
    return load(scratch, 0)


@njit(error_model="numpy")
def _rotate(x: Any, at: int, dim: int, cos: Any, sin: Any, place: int, scratch: Any) -> None:
    """Rotate x[at : at + dim] by the angles cos[place :] and sin[place :]."""
    half = dim // 2
    for d in range(0, half, WIDTH):
        first, second = load(x, at + d), load(x, at + half + d)
        by_cos = _rounded(scratch, first * load(cos, place + d))
        by_sin = _rounded(scratch, second * load(sin, place + d))
        store(x, at + d, by_cos - by_sin)
        by_cos = _rounded(scratch, second * load(cos, place + half + d))
        by_sin = _rounded(scratch, first * load(sin, place + half + d))
        store(x, at + half + d, by_cos + by_sin)


def _rotate_heads(sources: str, zero: np.generic) -> Callable[[Any], None]:
    """sources: a digest of all source code that is compiled into the kernel, since numba's cache looks at
    this file alone
    zero: a number of the type that the tensors' memory is read as
    """

    def rotate_heads(numbers: Any) -> None:
        """numbers: the step's, then those of `rotate_call`"""
        _ = sources
        step = number_at(numbers, 0)
        stride, q_heads, k_heads = number_at(numbers, 2), number_at(numbers, 3), number_at(numbers, 4)
        dim, q_weight_at, k_weight_at = number_at(numbers, 5), number_at(numbers, 6), number_at(numbers, 7)
        q_eps, k_eps = real_at(numbers, 8), real_at(numbers, 9)
        rows = number_at(step, ROWS)
        x = carray(pointer(number_at(step, number_at(numbers, 1)), zero), rows * stride)
        cos = carray(pointer(number_at(step, COS), zero), dim)
        sin = carray(pointer(number_at(step, SIN), zero), dim)
        q_weight = carray(pointer(q_weight_at, zero), dim)
        k_weight = carray(pointer(k_weight_at, zero), dim)
        scratch = np.empty(WIDTH, x.dtype)
        for row in range(rows):
            place = number_at(number_at(step, POSITIONS), row) * dim
            for head in range(q_heads + k_heads):
                at = row * stride + head * dim
                if head < q_heads:
                    if q_weight_at:
                        norm_row(x, at, q_weight, x, dim, q_eps)
                elif k_weight_at:
                    norm_row(x, at, k_weight, x, dim, k_eps)
                _rotate(x, at, dim, cos, sin, place, scratch)

    return rotate_heads


@functools.cache
def _sources() -> str:
    modules = (lanes, vectors, calls, rms_norm_cpu)
    files = (Path(str(path)).read_bytes() for path in (__file__, *(each.__file__ for each in modules)))
    return hashlib.sha256(b"".join(files)).hexdigest()
