"""INT4 product on packed words in plain Triton, on any GPU and under the interpreter: y = x @ w.T.

The bytes of w and the reference are in `packing.py`. Not fast: that is `kernels/hopper/`.
"""

import torch
from torch import Tensor

from ..triton_imports import tl, triton
from .packing import MAX_GROUP


@triton.jit
def unpack_tile(
    words, scale_words, tile_n, block, k_blocks, groups, rows,
    GROUP: tl.constexpr, FRACTIONAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile of the weight, [64, 64] of DTYPE."""
    word = tl.load(words + (tile_n * k_blocks + block).to(tl.int64) * 512 + tl.arange(0, 512))
    word = tl.permute(tl.reshape(word, [4, 8, 4, 2, 2]), [0, 4, 1, 3, 2])  # w, u, r, v, t
    word = tl.reshape(word, [64, 8, 1, 1])
    shift = tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 4)[None, :] * 4
    code = (word >> tl.reshape(shift, [1, 1, 2, 4])) & 0xF  # row, column pair, h, j
    code = tl.reshape(tl.permute(code, [0, 3, 1, 2]), [64, 64]).to(tl.float32)

    row = tile_n * 64 + tl.arange(0, 64)
    group = (block * 64 + tl.arange(0, 64)) // GROUP
    inside = (group < groups)[None, :]
    word = tl.load(scale_words + group[None, :] * rows + row[:, None], mask=inside, other=0)
    if FRACTIONAL:
        scale = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        offset = word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        weight = (code - 8.0) * scale + offset
    else:
        scale = (word & -16).to(tl.float32, bitcast=True).to(DTYPE).to(tl.float32)
        weight = (code - (word & 0xF).to(tl.float32)) * scale
    return weight.to(DTYPE)


@triton.jit(do_not_specialize=["M", "N", "k_octets", "k_blocks", "groups", "rows"])
def int4_swap_ab_kernel(
    x, words, scale_words, y, M, N, k_octets, k_blocks, groups, rows,
    BM: tl.constexpr, GROUP: tl.constexpr, FRACTIONAL: tl.constexpr,
):  # fmt: skip
    """acc [64, BM] += w tile [64, 64] . x tile [BM, 64]^T over K; grid (row tiles of w, tiles of M)."""
    K = k_octets * 8
    tile_n = tl.program_id(0)
    row = tile_n * 64 + tl.arange(0, 64)
    request = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.arange(0, 64)
    accumulator = tl.zeros([64, BM], tl.float32)
    for block in range(k_blocks):
        weight = unpack_tile(
            words, scale_words, tile_n, block, k_blocks, groups, rows, GROUP, FRACTIONAL, x.dtype.element_ty
        )
        k = block * 64 + column
        inside = (request < M)[None, :] & (k < K)[:, None]
        x_tile = tl.load(x + request[None, :].to(tl.int64) * K + k[:, None], mask=inside, other=0.0)
        accumulator = tl.dot(weight, x_tile, accumulator)
    inside = (request < M)[None, :] & (row < N)[:, None]
    offset = request[None, :].to(tl.int64) * N + row[:, None]
    tl.store(y + offset, accumulator.to(y.dtype.element_ty), mask=inside)


# Tile of M by the number of rows of x: a bucket, so that nothing compiles for a new M.
BUCKETS = (16, 32, 64)


def matmul(
    x: Tensor, words: Tensor, scale_words: Tensor, n: int, group_size: int, fractional: bool
) -> Tensor:
    """y [M, N] = x [M, K] @ w.T; x bf16 or fp16, contiguous."""
    m, k = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    block_m = next((bucket for bucket in BUCKETS if m <= bucket), BUCKETS[-1])
    grid = (words.shape[0], triton.cdiv(m, block_m))
    int4_swap_ab_kernel[grid](
        x, words, scale_words, y, m, n, k // 8, words.shape[1], *scale_words.shape,
        BM=block_m, GROUP=min(group_size, MAX_GROUP), FRACTIONAL=fractional, num_warps=4,
    )  # fmt: skip
    return y
