"""INT4 weights in the order of the matrix unit's registers: packing, torch reference, portable Triton kernels.

The same bytes feed `int4_hopper.py`, which is the fast path on Hopper; the kernels here run on any GPU that
Triton compiles for, and under its interpreter. Not for activations in fp32.

A packed weight stands for w [N, K] with groups of 32, 64 or 128 consecutive k (larger ones are repeated), and is

    words  int32 [N/64, K/128, 1024]     one tile of 64 rows and 128 columns after the other, along K
    meta   int32 [K/128 * P, N]          P = 128/group: the scale and the zero of a row's group in one word

both padded with zeros to whole tiles: a padded group has scale 0 and adds nothing.

One tile. Warp w of four takes rows 16w..16w+15 and lane l = 4r + t of it rows r and r+8, columns 2t, 2t+1, 2t+8,
2t+9 of each of the eight slices of 16 columns: what wgmma and mma.sync want of their first operand. So

    word index   w . v . r . t . u . s        v: column + 8    u: row + 8    s: slices 0-3 or 4-7
    bits         2   1   3   2   1   1

    row = 16 w + 8 u + r              a word: bit 31                                    bit 0
    column of the slice                 | j=3  j=2  j=1  j=0 | j=3  j=2  j=1  j=0 |   nibbles
        = 8 v + 2 t + h                 |     h = 1          |      h = 0         |
    slice = 4 s + j

and `(word >> 4j) & 0x000F000F | 0x43004300`, one shift and one lop3, is the register holding columns 2t and 2t+1
of slice 4s + j as two bf16 numbers 128 + q. A lane's eight words are two loads of 16 bytes.

A word of meta: with integer zeros the fp32 scale, its last four bits replaced by the zero; with fractional ones
two numbers of the activations' type, the scale in the high half and (8 - zero) * scale in the low half. Then

    integer zero      w = (q - zero) * scale                q - zero exact, one rounding to the activations' type
    fractional zero   w = (q - 8) * scale + (8 - zero) * scale       one rounding to the activations' type

Bytes of one weight in groups of 128: N*K/2 + N*K/32, that is 4.25 bits a weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_N = 64
TILE_K = 128


def pack_words(codes: Tensor) -> Tensor:
    """Codes uint8 [N, K] of 0..15 to words int32 [ceil(N/64), ceil(K/128), 1024]."""
    n, k = codes.shape
    tiles_n, tiles_k = triton.cdiv(n, TILE_N), triton.cdiv(k, TILE_K)
    if (n, k) != (tiles_n * TILE_N, tiles_k * TILE_K):
        codes = torch.nn.functional.pad(codes, (0, tiles_k * TILE_K - k, 0, tiles_n * TILE_N - n))
    parts = codes.view(tiles_n, 4, 2, 8, tiles_k, 2, 4, 2, 4, 2)  # tile, w, u, r, tile, s, j, v, t, h
    ordered = parts.permute(0, 4, 1, 7, 3, 8, 2, 5, 9, 6).reshape(tiles_n, tiles_k, 1024, 4, 2)
    return (ordered[..., 0] | (ordered[..., 1] << 4)).view(torch.int32).view(tiles_n, tiles_k, 1024)


def unpack_words(words: Tensor) -> Tensor:
    """The codes uint8 [N, K], N and K whole tiles; undoes `pack_words`."""
    tiles_n, tiles_k, _ = words.shape
    octets = words.contiguous().view(torch.uint8).view(tiles_n, tiles_k, 4, 2, 8, 4, 2, 2, 2, 2)
    nibbles = torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(
        -2
    )  # tile, tile, w, v, r, t, u, s, h, j
    parts = nibbles.permute(0, 2, 6, 4, 1, 7, 9, 3, 5, 8)
    return parts.reshape(tiles_n * TILE_N, tiles_k * TILE_K)


def pack_meta(scale: Tensor, zero: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Scale and zero [N, K/group] to meta int32 [ceil(K/128) * P, ceil(N/64) * 64].

    An integer `zero` gives the integer form, a floating one the fractional form for activations of `dtype`.
    """
    n, groups = scale.shape
    if group_size > TILE_K:
        repeats = group_size // TILE_K
        scale, zero = scale.repeat_interleave(repeats, 1), zero.repeat_interleave(repeats, 1)
        group_size, groups = TILE_K, groups * repeats
    per_tile = TILE_K // group_size
    padded = (triton.cdiv(groups, per_tile) * per_tile, triton.cdiv(n, TILE_N) * TILE_N)
    if zero.dtype.is_floating_point:
        high = scale.to(dtype)
        low = ((8.0 - zero.float()) * scale.float()).to(dtype)
        word = (high.view(torch.int16).int() << 16) | (low.view(torch.int16).int() & 0xFFFF)
    else:
        # Round to 19 bits of mantissa: the zero takes the last four.
        word = ((scale.float().contiguous().view(torch.int32) + 8) & -16) | zero.int()
    meta = torch.zeros(padded, dtype=torch.int32, device=scale.device)
    meta[:groups, :n] = word.t()
    return meta


def reference_weight(
    words: Tensor, meta: Tensor, group_size: int, fractional: bool, dtype: torch.dtype
) -> Tensor:
    """The weight the kernels multiply by, [N, K] in `dtype`, N and K whole tiles."""
    codes = unpack_words(words).float()
    rows, columns = codes.shape
    if fractional:
        scale = ((meta >> 16) & 0xFFFF).to(torch.int16).view(dtype).float()
        offset = (meta & 0xFFFF).to(torch.int16).view(dtype).float()
        centred = codes - 8.0
    else:
        scale = (meta & -16).view(torch.float32).to(dtype).float()
        offset = torch.zeros_like(scale)
        zero = (meta & 0xF).t().repeat_interleave(min(group_size, TILE_K), 1)
        centred = codes - zero
    spread = [part.t().repeat_interleave(min(group_size, TILE_K), 1) for part in (scale, offset)]
    return (centred * spread[0] + spread[1]).view(rows, columns).to(dtype)


def reference_matmul(
    x: Tensor, words: Tensor, meta: Tensor, n: int, group_size: int, fractional: bool
) -> Tensor:
    """y [M, N] = x [M, K] @ w.T in torch, sums in fp32."""
    weight = reference_weight(words, meta, group_size, fractional, x.dtype)[:n, : x.shape[1]]
    return (x.float() @ weight.float().t()).to(x.dtype)


@triton.jit
def unpack_tile(
    words, meta, tile_n, block, k_blocks, rows_padded,
    GROUP: tl.constexpr, FRACTIONAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile of the weight, [64, 128] of DTYPE."""
    word = tl.load(words + (tile_n * k_blocks + block).to(tl.int64) * 1024 + tl.arange(0, 1024))
    word = tl.permute(tl.reshape(word, [4, 2, 8, 4, 2, 2]), [0, 4, 2, 1, 3, 5])  # w, u, r, v, t, s
    word = tl.reshape(word, [64, 8, 2, 1, 1])
    shift = tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 4)[None, :] * 4
    code = (word >> tl.reshape(shift, [1, 1, 1, 2, 4])) & 0xF  # row, column pair, s, h, j
    code = tl.reshape(tl.permute(code, [0, 2, 4, 1, 3]), [64, 128 // GROUP, GROUP]).to(tl.float32)

    groups: tl.constexpr = 128 // GROUP
    group = block * groups + tl.arange(0, groups)
    row = tile_n * 64 + tl.arange(0, 64)
    word = tl.load(meta + group[None, :] * rows_padded + row[:, None])[:, :, None]
    if FRACTIONAL:
        scale = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        offset = word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        weight = (code - 8.0) * scale + offset
    else:
        scale = (word & -16).to(tl.float32, bitcast=True).to(DTYPE).to(tl.float32)
        weight = (code - (word & 0xF).to(tl.float32)) * scale
    return tl.reshape(weight.to(DTYPE), [64, 128])


@triton.jit(do_not_specialize=["M", "N", "k_octets", "k_blocks", "rows_padded"])
def int4_swap_ab_kernel(
    x, words, meta, y, M, N, k_octets, k_blocks, rows_padded,
    BM: tl.constexpr, GROUP: tl.constexpr, FRACTIONAL: tl.constexpr,
):  # fmt: skip
    """acc [64, BM] += w tile [64, 128] . x tile [BM, 128]^T over K; grid (row tiles of w, tiles of M)."""
    K = k_octets * 8
    tile_n = tl.program_id(0)
    row = tile_n * 64 + tl.arange(0, 64)
    request = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.arange(0, 128)
    accumulator = tl.zeros([64, BM], tl.float32)
    for block in range(k_blocks):
        weight = unpack_tile(
            words, meta, tile_n, block, k_blocks, rows_padded, GROUP, FRACTIONAL, x.dtype.element_ty
        )
        k = block * 128 + column
        inside = (request < M)[None, :] & (k < K)[:, None]
        x_tile = tl.load(x + request[None, :].to(tl.int64) * K + k[:, None], mask=inside, other=0.0)
        accumulator = tl.dot(weight, x_tile, accumulator)
    inside = (request < M)[None, :] & (row < N)[:, None]
    offset = request[None, :].to(tl.int64) * N + row[:, None]
    tl.store(y + offset, accumulator.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "K", "first_tile", "k_blocks", "rows_padded"])
def int4_dequantize_kernel(
    words, meta, weight, N, K, first_tile, k_blocks, rows_padded,
    GROUP: tl.constexpr, FRACTIONAL: tl.constexpr,
):  # fmt: skip
    """Tiles from `first_tile` on to weight [rows, K], whose row 0 is that tile's; grid (row tiles, K tiles)."""
    tile = tl.program_id(1)
    block = tl.program_id(0)
    values = unpack_tile(
        words,
        meta,
        first_tile + tile,
        block,
        k_blocks,
        rows_padded,
        GROUP,
        FRACTIONAL,
        weight.dtype.element_ty,
    )
    row = tile * 64 + tl.arange(0, 64)
    column = block * 128 + tl.arange(0, 128)
    inside = (first_tile * 64 + row < N)[:, None] & (column < K)[None, :]
    tl.store(weight + row[:, None].to(tl.int64) * K + column[None, :], values, mask=inside)


# Tile of M by the number of rows of x: a bucket, so that nothing compiles for a new M.
BUCKETS = (16, 32, 64)


def matmul(x: Tensor, words: Tensor, meta: Tensor, n: int, group_size: int, fractional: bool) -> Tensor:
    """y [M, N] = x [M, K] @ w.T; x bf16 or fp16, contiguous."""
    m, k = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    block_m = next((bucket for bucket in BUCKETS if m <= bucket), BUCKETS[-1])
    grid = (words.shape[0], triton.cdiv(m, block_m))
    int4_swap_ab_kernel[grid](
        x, words, meta, y, m, n, k // 8, words.shape[1], meta.shape[1],
        BM=block_m, GROUP=min(group_size, TILE_K), FRACTIONAL=fractional, num_warps=4,
    )  # fmt: skip
    return y


def dequantize(
    words: Tensor, meta: Tensor, out: Tensor, first_row: int, group_size: int, fractional: bool
) -> None:
    """Write rows `first_row`.. of the weight to out [rows, K]; `first_row` is a multiple of 64."""
    rows, k = out.shape
    grid = (words.shape[1], triton.cdiv(rows, TILE_N))
    int4_dequantize_kernel[grid](
        words, meta, out, first_row + rows, k, first_row // TILE_N, words.shape[1], meta.shape[1],
        GROUP=min(group_size, TILE_K), FRACTIONAL=fractional, num_warps=4,
    )  # fmt: skip
