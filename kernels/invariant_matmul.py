"""Batch-invariant matrix product of a plain weight: one order of summation for every number of rows; Triton.

Packed weights have `hopper/invariant.py`; cuBLAS is faster if bits may depend on
M.

    x        [M, K]   bf16, fp16 or fp32, rows contiguous
    weight   [N, K]   x's dtype, rows contiguous
    y        [M, N]   x's dtype

"Swap AB": the weight is the first operand of the matrix instruction, acc[BN, BM] += w[BN, BK] . x[BM, BK]^T,
so sixteen rows of x cost an instruction of N = 16. Sums run over K sixteen columns at a time, which is one
instruction, in every tile. Splits of K follow from the weight's shape alone. With few rows each split has a
CTA, and the last CTA to finish adds the partial sums in the order of K; with many rows one CTA takes all
splits in that order. M may therefore decide the tile, stages and warps, but not the bits of a row.

With few rows the kernel reads 2 * N * K bytes. Partial sums add 8 * M * N * splits, which stay in L2.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .device import compute_capability, keeps_sums_in_registers
from .triton_imports import tl, triton

SPLIT_UNIT = 256
"""Columns of K of which a split has a whole number: a multiple of every tile's."""
SLOTS = 132 * 2
"""CTAs that a large GPU runs at a time. A constant: splits must not follow the device."""
MAX_SPLITS = 8
SPLIT_TILE = 64
"""Rows of a weight in the smallest tile, by which splits are counted."""
MAX_SPLIT_ROWS = 256
"""Rows of x up to which splits have CTAs of their own."""


@dataclass(frozen=True)
class Tile:
    """bm: rows of x; bn: rows of the weight; bk: columns a step; stages: steps in flight; warps: of a CTA."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int


TILES = (
    Tile(16, 64, 128, 3, 4),
    Tile(32, 64, 128, 3, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(128, 128, 64, 3, 8),
    Tile(128, 128, 64, 4, 8),
    Tile(256, 128, 64, 3, 8),
)
"""Ascending. Up to 128 rows three CTAs share an SM, where a weight has more of them than `SLOTS`."""
DEEP_TILES = (
    Tile(16, 64, 128, 5, 4),
    Tile(32, 64, 128, 4, 4),
    Tile(64, 64, 64, 6, 4),
    Tile(128, 64, 64, 4, 4),
)
"""The same with more steps in flight, where two CTAs share an SM and no more are needed."""
TILE_ROWS = (16, 32, 64, 128, 1024)
"""Rows of x up to which each tile but the last serves."""
FLOAT32_TILE = Tile(16, 64, 32, 2, 4)
"""Of fp32, which no matrix unit multiplies exactly: right, and not fast."""


def tile_for(m: int, n: int, k: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tile:
    """Return the tile for m rows of x and a weight [n, k]: it decides the speed, and no bit."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    # The last has more sums than registers, where these hold operands as well.
    tiles = TILES[:-1] if keeps_sums_in_registers(capability) else TILES
    index = next((i for i, rows in enumerate(TILE_ROWS) if m <= rows), len(TILE_ROWS))
    few = triton.cdiv(n, SPLIT_TILE) * splits_of(n, k) <= SLOTS
    return DEEP_TILES[index] if few and index < len(DEEP_TILES) else tiles[min(index, len(tiles) - 1)]


@lru_cache(maxsize=4096)
def splits_of(n: int, k: int) -> int:
    """Return the number of splits of K. It depends on the weight's shape alone and is chosen so that one row
    fills a GPU.

    A split costs one and a half units to start, and three fifths of a unit to be added: little with one row,
    more with 128 rows, whose partial sums are large.
    """
    tiles, units = triton.cdiv(n, SPLIT_TILE), triton.cdiv(k, SPLIT_UNIT)
    if tiles >= SLOTS:
        return 1

    def cost(splits: int) -> float:
        adding = 0.6 * splits if splits > 1 else 0.0
        return triton.cdiv(tiles * splits, SLOTS) * (triton.cdiv(units, splits) + 1.5) + adding

    return min(range(1, min(MAX_SPLITS, units) + 1), key=cost)


def semaphores_of(n: int) -> int:
    """Return int32 zeros that a weight of n rows needs; every product resets them to zero."""
    return triton.cdiv(n, SPLIT_TILE) * triton.cdiv(MAX_SPLIT_ROWS, 128)


class Form(NamedTuple):
    """Compile-time parameters of the kernel.

    split_k: whether K is split
    sequential: whether one CTA takes all splits
    even: whether all tiles are complete
    evict:      Triton's policy for weights
    unit:       columns that splits are counted in
    """

    split_k: bool
    sequential: bool
    even: bool
    evict: str
    unit: int
    precision: str
    bm: int
    bn: int
    bk: int
    pdl: bool


@triton.jit
def _sum_columns(x_at, weight_at, in_x, in_weight, begin, end, K, FORM: tl.constexpr):
    """Return sums fp32 [bn, bm] over the columns begin .. end."""
    BM: tl.constexpr = FORM.bm
    BN: tl.constexpr = FORM.bn
    accumulator = tl.zeros([BN, BM], tl.float32)
    x_at += begin
    weight_at += begin
    column = tl.arange(0, FORM.bk)
    for k in range(begin, end, FORM.bk):
        if FORM.even:
            weight = tl.load(weight_at, eviction_policy=FORM.evict)
            x = tl.load(x_at, mask=in_x, other=0.0)
        else:
            inside = k + column < K
            in_tile = in_weight & inside[None, :]
            weight = tl.load(weight_at, mask=in_tile, other=0.0, eviction_policy=FORM.evict)
            x = tl.load(x_at, mask=in_x & inside[:, None], other=0.0)
        accumulator = tl.dot(weight, x, accumulator, input_precision=FORM.precision)
        weight_at += FORM.bk
        x_at += FORM.bk
    return accumulator


@triton.jit(do_not_specialize=["M", "tiles_m", "splits"])
def invariant_matmul_kernel(
    x_ptr, weight_ptr, y_ptr, partials, semaphores, M, N, K, units, tiles_m, splits, FORM: tl.constexpr,
):  # fmt: skip
    """The grid has the tiles of y, with all tiles of the same rows of the weight together; if each split has
    a CTA, the grid is as many times as large.
    """
    BM: tl.constexpr = FORM.bm
    BN: tl.constexpr = FORM.bn
    if FORM.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = (tile // tiles_m * BN + tl.arange(0, BN)).to(tl.int64)
    m = (tile % tiles_m * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.arange(0, FORM.bk)
    in_x = (m < M)[None, :]
    in_weight = (n < N)[:, None]
    x_at = x_ptr + m[None, :] * K + column[:, None]
    weight_at = weight_ptr + n[:, None] * K + column[None, :]
    y_at = y_ptr + m[None, :] * N + n[:, None]
    in_y = in_weight & in_x
    if FORM.sequential:
        total = tl.zeros([BN, BM], tl.float32)
        for index in range(splits):
            total += _sum_columns(
                x_at, weight_at, in_x, in_weight, index * units // splits * FORM.unit,
                (index + 1) * units // splits * FORM.unit, K, FORM,
            )  # fmt: skip
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=in_y)
    else:
        sums = _sum_columns(
            x_at, weight_at, in_x, in_weight, split * units // splits * FORM.unit,
            (split + 1) * units // splits * FORM.unit, K, FORM,
        )  # fmt: skip
        if FORM.split_k:
            within = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
            scratch = partials + tile.to(tl.int64) * splits * (BN * BM) + within
            tl.store(scratch + split * (BN * BM), sums)
            tl.debug_barrier()
            ended = tl.atomic_add(semaphores + tile, 1, sem="acq_rel", scope="gpu")
            if ended == splits - 1:
                total = tl.zeros([BN, BM], tl.float32)
                for index in range(splits):
                    total += tl.load(scratch + index * (BN * BM), cache_modifier=".cg")
                tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=in_y)
                tl.store(semaphores + tile, 0)
        else:
            tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=in_y)


def invariant_matmul(x: Tensor, weight: Tensor, semaphores: Tensor, tile: Tile | None = None) -> Tensor:
    """Return a new y [M, N]; arguments are described above. `tile` overrides the table, for tuning.

    semaphores: int32 zeros, `semaphores_of(N)` of them, for this weight alone
    """
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    capability = compute_capability(x.device)
    tile = tile or tile_for(m, n, k, x.dtype, capability)
    splits = splits_of(n, k)
    sequential = splits > 1 and m > MAX_SPLIT_ROWS
    own = splits if not sequential else 1
    tiles_m, tiles_n = triton.cdiv(m, tile.bm), triton.cdiv(n, tile.bn)
    scratch = tiles_m * tiles_n * tile.bm * tile.bn * splits if own > 1 else 1
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    pdl = capability >= (9, 0)
    form = Form(
        split_k=splits > 1,
        sequential=sequential,
        even=n % tile.bn == 0 and k % SPLIT_UNIT == 0,
        evict="evict_first" if tiles_m == 1 else "",
        unit=SPLIT_UNIT,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        bm=tile.bm,
        bn=tile.bn,
        bk=tile.bk,
        pdl=pdl,
    )
    invariant_matmul_kernel[(tiles_m * tiles_n, own)](
        x, weight, y, partials, semaphores, m, n, k, triton.cdiv(k, SPLIT_UNIT), tiles_m, splits, form,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    return y
