"""The orthonormal Hadamard rotation of head channels, which spreads outliers before few bits hold them.

Rows are in Sylvester's order: H[i, j] = (-1)^popcount(i & j) / sqrt(D). H is symmetric and its own inverse,
so rotated queries have the same products with rotated keys, and multiplying by H again rotates a result back.
"""

import functools

import torch
from torch import Tensor

from .triton_imports import tl, triton


@functools.cache
def _matrix(dim: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """[D, D] of +-1."""
    matrix = torch.ones(1, 1, device=device, dtype=dtype)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate_reference(x: Tensor) -> Tensor:
    """Multiply x [..., D] by the Hadamard matrix, in fp32. D is a power of two."""
    dim = x.shape[-1]
    return (x.float() @ _matrix(dim, x.device)) * dim**-0.5


@triton.jit
def rotate(x, ROWS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr):
    """Multiply x fp32 [ROWS, DIM] by the Hadamard matrix: one butterfly for each bit of the index, from the
    highest bit to the lowest.
    """
    for _ in tl.static_range(LOG_DIM):
        halves = tl.permute(tl.reshape(x, [ROWS, 2, DIM // 2]), [0, 2, 1])
        low, high = tl.split(halves)
        x = tl.reshape(tl.join(low + high, low - high), [ROWS, DIM])
    return x * (1.0 / DIM) ** 0.5


@triton.jit
def rotate_slices(x0, x1, x2, x3, matrix_ptr, WIDTH: tl.constexpr):
    """Multiply columns by the Hadamard matrix, in fp32: slices [D/4, M] of neighbouring channels are
    multiplied, then added.

    The Hadamard matrix of D is the Kronecker product of the Hadamard matrices of 4 and of D/4. matrix: fp16
    [D/4, D/4] of +-1
    """
    line = tl.arange(0, WIDTH)
    matrix = tl.load(matrix_ptr + line[:, None] * WIDTH + line[None, :])
    x0 = tl.dot(matrix, x0.to(tl.float32).to(tl.float16))
    x1 = tl.dot(matrix, x1.to(tl.float32).to(tl.float16))
    x2 = tl.dot(matrix, x2.to(tl.float32).to(tl.float16))
    x3 = tl.dot(matrix, x3.to(tl.float32).to(tl.float16))
    by: tl.constexpr = (0.25 / WIDTH) ** 0.5
    sum0, difference0, sum1, difference1 = (x0 + x1) * by, (x0 - x1) * by, (x2 + x3) * by, (x2 - x3) * by
    return sum0 + sum1, difference0 + difference1, sum0 - sum1, difference0 - difference1


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_rows(
    x_ptr, matrix_ptr, out_ptr, num_rows, token_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Rotate TILES times ROWS rows; some rows are loaded while earlier rows are multiplied.

    The compiler knows that the stride is divisible by 16, so that a load can read eight channels.
    """
    dim = tl.arange(0, DIM)
    matrix = tl.load(matrix_ptr + dim[:, None] * DIM + dim[None, :])
    for tile in tl.range(TILES, num_stages=3):
        row = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        keep = (row < num_rows)[:, None]
        source = row // HEADS * token_stride + row % HEADS * DIM
        x = tl.load(x_ptr + source[:, None] + dim[None, :], mask=keep, other=0.0)
        rotated = tl.dot(x, matrix) * (1.0 / DIM) ** 0.5
        out = out_ptr + row[:, None] * DIM + dim[None, :]
        tl.store(out, rotated.to(out_ptr.dtype.element_ty), mask=keep)


def rotates_by_products(x: Tensor) -> bool:
    """Say whether `rotate_rows` supports x [T, H, D]: 16 bits, and a matrix that fits into shared memory."""
    return x.element_size() == 2 and 16 <= x.shape[2] <= 128


def rotate_rows(x: Tensor, out: Tensor) -> None:
    """Write x [T, H, D] times the Hadamard matrix into `out`, contiguous, of any float dtype; a token's heads
    are contiguous in x.

    The rotation uses the matrix units: for many tokens a butterfly takes three times as long.
    """
    tokens, heads, dim = x.shape
    rows, tiles = 64, 8
    _rotate_rows[(triton.cdiv(tokens * heads, rows * tiles),)](
        x, _matrix(dim, x.device, x.dtype), out, tokens * heads, x.stride(0),
        HEADS=heads, DIM=dim, ROWS=rows, TILES=tiles, num_warps=4,
    )  # fmt: skip


def log2(dim: int) -> int:
    """Return the Hadamard matrix of a power of two."""
    return dim.bit_length() - 1
