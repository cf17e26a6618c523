"""INT4 products of many rows of x: a piece of the weight dequantized, cuBLAS on it, then the next piece.

From some number of rows on the matrix unit is all that counts, and cuBLAS keeps it busier than a kernel that
also unpacks: `int4_many_rows.py` says when. Portable Triton on the bytes of `int4_swap_ab.py`, where the
reference is. Not for batch-invariant serving: what cuBLAS sums in which order depends on M.

    w [N, K] in tiles of 64 x 64  ->  piece [rows, K] of the activations' type  ->  y[:, piece] = x @ piece.T

Bytes: N*K/2 + N*K/32 read, 2*N*K written and read again, which at 4.3 TB/s is 10 us for 4096 x 4096; measured
11.3. Pieces that stay in L2 cost cuBLAS more than they save, so a piece is as large as may be: its memory,
which the allocator hands to every layer in turn, is all that this needs.

One program makes 64 rows of BLOCKS tiles side by side. A code becomes a number without a conversion: or-ed
into the last bits of 2**23 it is the fp32 number 2**23 + code, from which 2**23 + zero is subtracted exactly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int4_swap_ab import MAX_GROUP, TILE

BLOCKS, WARPS = 2, 4
PIECE_BYTES = 256 << 20
PIECE_ROWS = 256
"""What a piece's rows are a multiple of: whole tiles of cuBLAS's."""


@triton.jit(do_not_specialize=["k_octets", "first_tile", "k_blocks", "groups", "rows"])
def int4_dequantize_kernel(
    words, meta, weight, k_octets, first_tile, k_blocks, groups, rows,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, FRACTIONAL: tl.constexpr,
):  # fmt: skip
    """Tiles from `first_tile` on to weight [rows, K], row 0 being that tile's; grid (K blocks, row tiles)."""
    DTYPE: tl.constexpr = weight.dtype.element_ty
    GROUPS: tl.constexpr = BLOCKS * 64 // GROUP
    tile = tl.program_id(1)
    first_block = tl.program_id(0) * BLOCKS

    at = tl.arange(0, BLOCKS * 512)
    start = words + ((first_tile + tile).to(tl.int64) * k_blocks + first_block) * 512
    word = tl.load(start + at, mask=first_block + at // 512 < k_blocks, other=0)
    word = tl.permute(tl.reshape(word, [BLOCKS, 4, 8, 4, 2, 2]), [1, 5, 2, 0, 4, 3])  # w, u, r, block, v, t
    word = tl.reshape(word, [64, BLOCKS, 1, 2, 4, 1])
    shift = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 2)[None, :] * 16
    code = (word >> tl.reshape(shift, [1, 1, 4, 1, 1, 2])) & 0xF  # row, block, j, v, t, h
    code = tl.reshape(code, [64, GROUPS, GROUP])
    number = (code | 0x4B000000).to(tl.float32, bitcast=True)

    row = (first_tile + tile) * 64 + tl.arange(0, 64)
    group = first_block * 64 // GROUP + tl.arange(0, GROUPS)
    pair = tl.load(meta + group[None, :] * rows + row[:, None], mask=(group < groups)[None, :], other=0)
    pair = tl.reshape(pair, [64, GROUPS, 1])
    if FRACTIONAL:
        scale = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        offset = pair.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        values = (number - 8388616.0) * scale + offset
    else:
        scale = (pair & -16).to(tl.float32, bitcast=True).to(DTYPE).to(tl.float32)
        zero = ((pair & 0xF) | 0x4B000000).to(tl.float32, bitcast=True)
        values = (number - zero) * scale
    values = tl.reshape(values.to(DTYPE), [64, BLOCKS * 64])

    K = k_octets * 8
    column = first_block * 64 + tl.arange(0, BLOCKS * 64)
    target = (tile * 64 + tl.arange(0, 64))[:, None].to(tl.int64) * K + column[None, :]
    tl.store(weight + target, values, mask=(column < K)[None, :])


def dequantize(
    words: Tensor, meta: Tensor, out: Tensor, first_row: int, group_size: int, fractional: bool
) -> None:
    """Write rows `first_row`.. of the weight to out [rows, K], contiguous; both are multiples of 64.

    Rows that pad the last tile come out as zeros.
    """
    rows, k = out.shape
    grid = (triton.cdiv(words.shape[1], BLOCKS), rows // TILE)
    int4_dequantize_kernel[grid](
        words, meta, out, k // 8, first_row // TILE, words.shape[1], *meta.shape,
        BLOCKS=BLOCKS, GROUP=min(group_size, MAX_GROUP), FRACTIONAL=fractional, num_warps=WARPS,
    )  # fmt: skip


def piece_rows(n: int, k: int) -> int:
    """Rows of the weight in a piece; all pieces are as good as equal."""
    pieces = triton.cdiv(2 * n * k, PIECE_BYTES)
    return triton.cdiv(triton.cdiv(n, pieces), PIECE_ROWS) * PIECE_ROWS


def matmul(
    x: Tensor, words: Tensor, meta: Tensor, y: Tensor, first_row: int, group_size: int, fractional: bool
) -> None:
    """Write y[:, first_row:] of y [M, N] = x [M, K] @ w.T; x bf16 or fp16; `first_row` a multiple of 64."""
    n, k = y.shape[1], x.shape[1]
    padded = words.shape[0] * TILE
    step = min(piece_rows(n - first_row, k), padded - first_row)
    piece = torch.empty((step, k), dtype=x.dtype, device=x.device)
    for first in range(first_row, n, step):
        some = piece[: min(step, padded - first)]
        dequantize(words, meta, some, first, group_size, fractional)
        part = y[:, first : first + step]
        torch.mm(x, some[: part.shape[1]].t(), out=part)
