"""NVFP4 times NVFP4 by the tensor cores of Blackwell: y [M, N] = (x * x_scale) @ (w * w_scale).T * factor.

    x       uint8 [M, K/2]     E2M1 codes, the low nibble is the even k       x_scale  float8_e4m3fn [M, K/16]
    w       uint8 [N, K/2]     the same                                       w_scale  float8_e4m3fn [N, K/16]
    factor  fp32 [1]           both global scales, multiplied
    y       [M, N]             bf16 or fp16

`tl.dot_scaled` multiplies codes by codes and applies the scales: `tcgen05.mma` of kind mxf4nvf4 on 10.0, and
`mma.sync` of that kind on 12.0 (and, with Triton 3.9, on 12.1). "Swap AB": the weight is the first operand,
since tcgen05 takes 128 rows of the first operand, and 16 or more of the second. The bytes are the
checkpoint's own. Sums over K run in one order, in fp32.

We have no Blackwell GPU: the native forms were compiled but never run. The same kernel with `native=False`
decodes both operands and multiplies them in fp16, exactly; tests use it to check the rest of the kernel in
the interpreter and on other GPUs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_imports import tl, triton

GROUP = 16
E2M1_MAX = tl.constexpr(6.0)
E4M3_MAX, E4M3_SMALLEST = tl.constexpr(448.0), tl.constexpr(2.0**-9)
HALF_EVEN = tl.constexpr(1.5 * 2**23)
"""Added to a number in fp32 and taken away again, it rounds the number to an integer, ties to even."""
GROUPS_AT_ONCE = 64


class ScaledTile(NamedTuple):
    """bm: rows of x; bn: rows of the weight; bk: columns of a step."""

    bm: int
    bn: int = 128
    bk: int = 256
    stages: int = 3
    warps: int = 4


TILES = (ScaledTile(16), ScaledTile(32), ScaledTile(64), ScaledTile(128))
"""By rows of x, from arithmetic alone: a step brings 18 KB of weights, and three are on their way."""


def tile_for(m: int) -> ScaledTile:
    return next((tile for tile in TILES if m <= tile.bm), TILES[-1])


@triton.jit
def _numbers(codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return fp16 [ROWS, COLUMNS] from codes [ROWS, COLUMNS / 2] and scales; the result is exact, since it
    needs at most seven bits of mantissa.
    """
    code = tl.reshape(tl.join(codes & 0xF, codes >> 4), [ROWS, COLUMNS]).to(tl.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    quarters = tl.where(exponent == 0, 2 * mantissa, (2 + mantissa) << exponent).to(tl.float32)
    values = tl.where(code > 7, -0.25, 0.25) * quarters
    groups = tl.reshape(values, [ROWS, COLUMNS // 16, 16]) * scales.to(tl.float32)[:, :, None]
    return tl.reshape(groups, [ROWS, COLUMNS]).to(tl.float16)


@triton.jit
def nvfp4_scaled_kernel(
    x, x_scale, w, w_scale, factor, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The grid has the tiles of y, with all tiles of the same rows of the weight together."""
    tiles_m = tl.cdiv(M, BM)
    n = tl.program_id(0) // tiles_m * BN + tl.arange(0, BN)
    m = tl.program_id(0) % tiles_m * BM + tl.arange(0, BM)
    # Past the end: the last row again, and not stored.
    of_w, of_x = tl.minimum(n, N - 1).to(tl.int64)[:, None], tl.minimum(m, M - 1).to(tl.int64)[:, None]
    byte, group = tl.arange(0, BK // 2), tl.arange(0, BK // 16)
    w_at, w_scales_at = w + of_w * (K // 2) + byte[None, :], w_scale + of_w * (K // 16) + group[None, :]
    x_at, x_scales_at = x + of_x * (K // 2) + byte[None, :], x_scale + of_x * (K // 16) + group[None, :]
    sums = tl.zeros([BN, BM], tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        inside = (step * (BK // 2) + byte < K // 2)[None, :]
        has_scale = (step * (BK // 16) + group < K // 16)[None, :]
        w_codes = tl.load(w_at + step * (BK // 2), mask=inside, other=0)
        x_codes = tl.load(x_at + step * (BK // 2), mask=inside, other=0)
        w_scales = tl.load(w_scales_at + step * (BK // 16), mask=has_scale, other=0.0)
        x_scales = tl.load(x_scales_at + step * (BK // 16), mask=has_scale, other=0.0)
        if NATIVE:
            sums = tl.dot_scaled(w_codes, w_scales, "e2m1", x_codes.T, x_scales, "e2m1", sums)
        else:
            x_numbers = tl.trans(_numbers(x_codes, x_scales, BM, BK))
            sums = tl.dot(_numbers(w_codes, w_scales, BN, BK), x_numbers, sums)
    sums *= tl.load(factor)
    at = y + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, sums.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def round_to_nvfp4_kernel(
    x, codes, scales, global_scale, groups, DIVIDES: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Each program rounds a number of consecutive groups of 16; `layouts/formats/nvfp4.py` defines the
    result.
    """
    group = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = group < groups
    column = tl.arange(0, 16)
    stored = tl.load(x + group[:, None] * 16 + column[None, :], mask=inside[:, None], other=0.0)
    values = stored.to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    wide = tl.load(global_scale) + tl.zeros_like(largest)
    six = tl.zeros_like(largest) + E2M1_MAX
    if DIVIDES:
        # In the input's own type, as the definition has it.
        wanted = wide * tl.div_rn(largest, six).to(x.dtype.element_ty).to(tl.float32)
    else:
        wanted = tl.maximum(tl.div_rn(largest, six * wide), E4M3_SMALLEST)
    scale = tl.minimum(wanted, E4M3_MAX).to(tl.float8e4nv)
    whole = scale.to(tl.float32)
    whole = tl.div_rn(whole, wide) if DIVIDES else whole * wide
    divisor = tl.where(whole > 0, whole, 1.0)[:, None] + tl.zeros_like(values)
    codes_of = tl.where(whole[:, None] > 0, tl.div_rn(values, divisor), 0.0)
    magnitude = tl.minimum(tl.abs(codes_of), E2M1_MAX)
    # Values are 0.5 apart below 2, 1 apart below 4, then 2.
    times = tl.where(magnitude < 2, 2.0, tl.where(magnitude < 4, 1.0, 0.5))
    nearest = (magnitude * times + HALF_EVEN) - HALF_EVEN
    code = (nearest + tl.where(magnitude < 2, 0.0, tl.where(magnitude < 4, 2.0, 4.0))).to(tl.int32)
    code = code | tl.where(codes_of < 0, 8, 0)
    low, high = tl.split(tl.reshape(code, [AT_ONCE, 8, 2]))
    byte = tl.arange(0, 8)
    tl.store(codes + group[:, None] * 8 + byte[None, :], (low | high << 4).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + group, scale, mask=inside)


def round_to_nvfp4(x: Tensor, global_scale: Tensor, divides: bool) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [M, K/2] and scales e4m3 [M, K/16] of x [M, K], whose rows are contiguous."""
    m, k = x.shape
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(m, k // GROUP, dtype=torch.float8_e4m3fn, device=x.device)
    groups = m * k // GROUP
    if groups:
        round_to_nvfp4_kernel[(triton.cdiv(groups, GROUPS_AT_ONCE),)](
            x, codes, scales, global_scale, groups, divides, GROUPS_AT_ONCE
        )
    return codes, scales


def scaled_matmul(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    factor: Tensor,
    dtype: torch.dtype,
    native: bool = True,
    tile: ScaledTile | None = None,
) -> Tensor:
    """Return a new y [M, N] of `dtype`; the file's docstring describes the other arguments."""
    m, n, k = x.shape[0], w.shape[0], 2 * w.shape[1]
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    if m == 0:
        return y
    tile = tile or tile_for(m)
    nvfp4_scaled_kernel[(triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn),)](
        x, x_scale, w, w_scale, factor, y, m, n, k, tile.bm, tile.bn, tile.bk, native,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
