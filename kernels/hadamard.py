"""The orthonormal Hadamard rotation of head channels, which spreads outliers before few bits hold them.

Sylvester's order: H[i, j] = (-1)^popcount(i & j) / sqrt(D). H is symmetric and its own inverse, so queries
rotated alike have the same products with rotated keys, and a rotated result is rotated back by H again.
"""

import functools

import torch
from torch import Tensor

from .triton_imports import tl, triton


@functools.cache
def _matrix(dim: int, device: torch.device) -> Tensor:
    """fp32 [D, D] of +-1."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate_reference(x: Tensor) -> Tensor:
    """x [..., D] times H, fp32. D is a power of two."""
    dim = x.shape[-1]
    return (x.float() @ _matrix(dim, x.device)) * dim**-0.5


@triton.jit
def rotate(x, ROWS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr):
    """x fp32 [ROWS, DIM] times H: a butterfly for each index bit, which goes from top to bottom."""
    for _ in tl.static_range(LOG_DIM):
        halves = tl.permute(tl.reshape(x, [ROWS, 2, DIM // 2]), [0, 2, 1])
        low, high = tl.split(halves)
        x = tl.reshape(tl.join(low + high, low - high), [ROWS, DIM])
    return x * (1.0 / DIM) ** 0.5


def log2(dim: int) -> int:
    """Of a power of two."""
    return dim.bit_length() - 1
