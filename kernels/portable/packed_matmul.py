"""Matrix product with a packed weight on GPUs from 8.0 on: y [M, N] = x [M, K] @ w.T; Triton.

On Hopper this kernel is slower than `kernels/hopper/`, which is written for it.

    x            [M, K]                           bf16 or fp16, rows contiguous
    words        int32 [N/64, P*K/128, 64, w]     tiles of 64 rows, 128 columns; the last zero-padded
    scale_words  int32 [P*K/128 * s, N]           s words for a row of a tile; K and N padded to whole tiles
    factor       fp32 [1] or [N]                  what the sums are multiplied by, or None
    table        int32                            what a decoder looks numbers up in, or None
    y            [M, N]                           x's dtype

Words, scale words and decoders are those of the grouped product of experts (`experts/packed.py`), so that one
packing of the bytes serves both products; w is 16. IQ2_XXS and E4M3, which no experts have, have bytes of
their own, and w is 8 and 32. With P = 2 planes a weight is the sum of two planes that lie one behind the
other along K, and x is read twice: INT8 uses this.

    HBM:  words, scales ----+        +---- x
                            v        v
          cp.async ring of `stages` steps of 128 columns (Triton's pipelining)
                            v        v
          words to registers,      ldmatrix
          decoded there: shifts,     |
          lop3, fma; no value        |
          changes lanes              |
                            v        v
             mma.sync m16n8k16, acc [bn, bm] fp32  ("swap AB": the weight is the first operand)
                            v
          partial sums of a split, fp32, through L2; the CTA that ends last adds them in the order of K

Splits of K follow from the weight's shape alone, and within a split sums run over K sixteen columns at a
time. With few rows each split has a CTA; with many rows, one CTA takes all splits in that order. M may
therefore decide the tile, but not the bits of a row if all tiles use mma.sync; on Hopper, larger tiles use
wgmma. The kernel repeats its bits on every GPU.

With few rows it reads 4.25 bits a weight in INT4 with groups of 128. Partial sums add `8 M N splits` in L2.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..experts.packed import ExpertsDecoder, load_scales
from ..split_k import ends_last, partials_of, sum_of_splits
from ..triton_imports import tl, triton
from .tiles import MAX_SPLIT_ROWS, STEP_COLUMNS, TILE_ROWS, Tile, splits_of, tile_for


@dataclass(frozen=True)
class PortableOperand:
    """A packed weight [N, K] as the kernel takes it; shapes are as in the file's docstring.

    semaphores  int32 zeros, `semaphores_of(N)` of them, for this weight alone
    planes      P
    """

    words: Tensor
    scale_words: Tensor
    semaphores: Tensor
    decoder: ExpertsDecoder
    factor: Tensor | None = None
    planes: int = 1
    table: Tensor | None = None


class Form(NamedTuple):
    """Compile-time parameters of the kernel, beside the decoder.

    split_k: whether K is split
    sequential: whether one CTA takes all splits
    even_k: whether K is a whole number of tiles
    evict:      Triton's policy for words
    asm: whether the decoder may use PTX
    factor_by_row: whether each row of the weight has a factor of its own
    """

    split_k: bool
    sequential: bool
    even_k: bool
    evict: str
    bm: int
    bn: int
    parts: int
    asm: bool
    factor_by_row: bool


@triton.jit
def _sum_tiles(
    x_at, words_at, scales_at, table, in_x, begin, end, K, rows, plane_tiles, DECODER: tl.constexpr, FORM:
    tl.constexpr
):  # fmt: skip
    """Return sums fp32 [bn, bm] over the tiles begin .. end along K."""
    BM: tl.constexpr = FORM.bm
    BN: tl.constexpr = FORM.bn
    SCALE_ROWS: tl.constexpr = DECODER.scale_rows
    TILE_WORDS: tl.constexpr = 64 * DECODER.row_words
    EVICT: tl.constexpr = FORM.evict
    accumulator = tl.zeros([BN, BM], tl.float32)
    PARTS: tl.constexpr = FORM.parts
    WIDTH: tl.constexpr = 128 // PARTS
    column = tl.arange(0, WIDTH)
    # Else ptxas sees the sums defined on a way around the loop, and has each wgmma wait for the one before.
    tl.assume(end > begin)
    for k_tile in range(begin, end):
        word = DECODER.load_words(words_at, k_tile * TILE_WORDS, table, BN, EVICT)
        scales = load_scales(scales_at + k_tile * rows * SCALE_ROWS, rows, SCALE_ROWS, BN)
        for part in tl.static_range(PARTS):
            first = k_tile % plane_tiles * 128 + part * WIDTH
            inside = in_x
            if not FORM.even_k:
                inside = inside & (first + column < K)[:, None]
            x_part = tl.load(x_at + first, mask=inside, other=0.0)
            if FORM.asm:
                weight = DECODER.unpack_in_registers(word, scales, DECODER, BN, part, PARTS)
            else:
                weight = DECODER.unpack_plainly(word, scales, DECODER, BN, part, PARTS)
            accumulator = tl.dot(weight, x_part, accumulator)
    return accumulator


@triton.jit
def _store(y_at, sums, factor, n, N, in_y, FORM: tl.constexpr):
    if FORM.factor_by_row:
        sums *= tl.load(factor + tl.minimum(n, N - 1))[:, None]
    elif factor is not None:
        sums *= tl.load(factor)
    tl.store(y_at, sums.to(y_at.dtype.element_ty), mask=in_y)


@triton.jit(
    do_not_specialize=["M", "tiles_m", "splits"],
    repr=lambda form: form.constants["DECODER"].name + "_portable_kernel",
)
def portable_kernel(
    x, words, scale_words, factor, table, y, partials, semaphores, M, N, K, rows, k_tiles, plane_tiles,
    tiles_m, splits, DECODER: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The grid has the tiles of y, with all tiles of the same rows of the weight together; if each split has
    a CTA, the grid is as many times as large.

    rows:    N padded to whole tiles of 64
    k_tiles: tiles of words along K; each plane has `plane_tiles` of them
    """
    BM: tl.constexpr = FORM.bm
    BN: tl.constexpr = FORM.bn
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile // tiles_m * BN + tl.arange(0, BN)
    m = (tile % tiles_m * BM + tl.arange(0, BM)).to(tl.int64)
    row_tile = tl.minimum(n // 64, rows // 64 - 1).to(
        tl.int64
    )  # past the end: the last again, and not stored
    in_x = (m < M)[None, :]
    x_at = x + m[None, :] * K + tl.arange(0, 128 // FORM.parts)[:, None]
    words_at = DECODER.words_at(words + (row_tile * k_tiles * 64 + n % 64) * DECODER.row_words, table, BN)
    scales_at = scale_words + row_tile * 64 + n % 64
    y_at = y + m[None, :] * N + n[:, None]
    in_y = (n < N)[:, None] & in_x
    if FORM.sequential:
        total = tl.zeros([BN, BM], tl.float32)
        for index in range(splits):
            total += _sum_tiles(
                x_at, words_at, scales_at, table, in_x, index * k_tiles // splits,
                (index + 1) * k_tiles // splits, K, rows, plane_tiles, DECODER, FORM,
            )  # fmt: skip
        _store(y_at, total, factor, n, N, in_y, FORM)
    else:
        sums = _sum_tiles(
            x_at, words_at, scales_at, table, in_x, split * k_tiles // splits,
            (split + 1) * k_tiles // splits, K, rows, plane_tiles, DECODER, FORM,
        )  # fmt: skip
        if FORM.split_k:
            at = partials_of(partials, tile, splits, BN, BM)
            if ends_last(at, sums, semaphores + tile, split, splits, BN, BM):
                total = sum_of_splits(at, semaphores + tile, splits, BN, BM)
                _store(y_at, total, factor, n, N, in_y, FORM)
        else:
            _store(y_at, sums, factor, n, N, in_y, FORM)


def matmul(x: Tensor, weight: PortableOperand, n: int, tile: Tile | None = None) -> Tensor:
    """Return a new y [M, n]; x is contiguous. `tile` overrides the table, for tuning."""
    m, k = x.shape
    rows, k_tiles = weight.words.shape[0] * TILE_ROWS, weight.words.shape[1]
    plane_tiles = k_tiles // weight.planes
    if triton.cdiv(k, STEP_COLUMNS) != plane_tiles:
        raise ValueError(f"x has {k} columns, the packed weight {plane_tiles} tiles of {STEP_COLUMNS}")
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    splits = splits_of(n, k_tiles)
    sequential = splits > 1 and m > MAX_SPLIT_ROWS
    tile = tile or tile_for(m, sequential)
    own = 1 if sequential else splits
    tiles_m, tiles_n = triton.cdiv(m, tile.bm), triton.cdiv(n, tile.bn)
    scratch = tiles_m * tiles_n * tile.bm * tile.bn * splits if own > 1 else 1
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    form = Form(
        split_k=splits > 1,
        sequential=sequential,
        even_k=k % STEP_COLUMNS == 0,
        evict="evict_first" if tiles_m == 1 else "",
        bm=tile.bm,
        bn=tile.bn,
        parts=tile.parts,
        asm=x.device.type == "cuda",
        factor_by_row=weight.factor is not None and len(weight.factor) > 1,
    )
    portable_kernel[(tiles_m * tiles_n, own)](
        x, weight.words, weight.scale_words, weight.factor, weight.table, y, partials, weight.semaphores,
        m, n, k, rows, k_tiles, plane_tiles, tiles_m, splits, weight.decoder, form,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
