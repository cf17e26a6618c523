"""Grouped products on packed experts, of any format: a Triton kernel without conversions, and its launch.

    x            [R, K]                          bf16 or fp16, rows contiguous; A // R assignments share one
    words        int32 [E, N/64, K/128, 64, 16]  tiles of 64 rows, 128 columns; the last zero-padded
    scale_words  int32 [E, K/128 * s, N]         s words for a row of a tile; K and N padded to whole tiles
    factor       fp32 [E]                        what an expert's sums are multiplied by, or None
    bias         [E, N]                          x's dtype, or None
    y            [A, N]                          by assignment; not written if an assignment is in no block

The decoder, one per format (`int4.py`, `nvfp4.py`), defines the meaning of words and scale words. Slice j of
a tile's 128 columns holds columns 16j .. 16j+15; the words 2t and 2t+1 of a row hold columns 2t and 2t+1 of
every slice, word 2t of slices 0 to 3, word 2t+1 of slices 4 to 7. Words are therefore read from shared memory
directly into the registers in which the matrix instruction needs its first operand, and no value changes
lanes. The weight is the first operand ("swap AB"), and blocks are as in `unquantized.py`. Sums over K are
added in one fixed order, in fp32.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability
from ..triton_imports import tl, triton
from .routing import ExpertRouting
from .tile import Tile

TILE_N, TILE_K = 64, 128
TWO_CHAINS_TO = 8
"""Rows of a block up to which a turn of the loop takes two tiles of words."""
TILES = (
    Tile(n=64, k=TILE_K, stages=3, warps=4),
    Tile(n=128, k=TILE_K, stages=3, warps=4),
    Tile(n=128, k=TILE_K, stages=3, warps=4),
    Tile(n=128, k=TILE_K, stages=4, warps=4),
    Tile(n=128, k=TILE_K, stages=3, warps=4),
    Tile(n=128, k=TILE_K, stages=3, warps=4),
)
"""By bucket of rows an expert gets, see `tile.py`; k is a tile of words.

As tuned on an H200 for Qwen3-30B-A3B's shapes in INT4 (`tests/bench/kernels/experts.py --tune`). Few experts
fill the device with small tiles; with more rows, large ones read x less often. The last spills a little,
and is the fastest.
"""
REUSED_FROM = 64
"""Rows of a block from which an expert is likely to have several: its weight then stays in the cache."""


@triton.jit
def words_at(rows_at, table, BN: tl.constexpr):
    """Return where the words of rows lie, [BN, 16]."""
    return rows_at[:, None] + tl.arange(0, 16)[None, :]


@triton.jit
def load_words(at, offset, table, BN: tl.constexpr, EVICT: tl.constexpr):
    return tl.load(at + offset, eviction_policy=EVICT)


@dataclass(frozen=True)
class ExpertsDecoder(ABC):
    """A format's parameters and its device functions; the kernel is compiled for each decoder.

    unpack_in_registers(words, scales, DECODER, BN, PART, PARTS)   of the tile [BN, 128] of words [BN, 16] and
                                                                   `scale_rows` scale words [BN, 16] one part
                                                                   of 1, 2 or 4 along the columns
    unpack_plainly(words, scales, DECODER, BN, PART, PARTS)        the same without PTX: for the interpreter
    words_at(rows_at, table, BN)                                   where the words of rows of a tile lie
    load_words(at, offset, table, BN, EVICT)                       what `unpack` takes as words; `table` is
                                                                   the format's, or None

    half  activations and weights are fp16, else bf16

    The grouped product takes decoders with 16 words in a row, and loads them itself.
    """

    half: bool

    name: ClassVar[str]
    unpack_in_registers: ClassVar[Any]
    unpack_plainly: ClassVar[Any]
    words_at: ClassVar[Any] = words_at
    load_words: ClassVar[Any] = load_words

    @property
    def row_words(self) -> int:
        """Words of a row of a tile."""
        return 16

    @property
    @abstractmethod
    def scale_rows(self) -> int:
        """The number of scale words for a row of a tile: 1, 2 or 4."""

    @property
    def cache_key(self) -> str:
        """Triton's cache key, so that no compiled kernel outlives the source of a decoder."""
        functions = self.unpack_in_registers, self.unpack_plainly, self.words_at, self.load_words
        return "-".join([repr(self), *(function.cache_key for function in functions)])


def by_word(codes: Tensor) -> Tensor:
    """Lay out codes uint8 [N, K] as [N/64, K/128, 64, 16, 4, 2]: tile, tile, row, word, slice of 4, column.

    N and K are padded with zeros to whole tiles.
    """
    n, k = codes.shape
    tiles_n, tiles_k = triton.cdiv(n, TILE_N), triton.cdiv(k, TILE_K)
    codes = torch.nn.functional.pad(codes, (0, tiles_k * TILE_K - k, 0, tiles_n * TILE_N - n))
    parts = codes.view(tiles_n, TILE_N, tiles_k, 2, 4, 8, 2)  # tile, row, tile, j / 4, j % 4, t, column % 2
    return parts.permute(0, 2, 1, 5, 3, 4, 6).reshape(tiles_n, tiles_k, TILE_N, 16, 4, 2)


@triton.jit
def of_rows(at, BN: tl.constexpr):
    """Load a row's word of scale_words, once for each of the row's words."""
    return tl.broadcast_to(tl.load(at)[:, None], [BN, 16])


@triton.jit
def load_scales(at, rows, COUNT: tl.constexpr, BN: tl.constexpr):
    """Load the scale words of one tile, each [BN, 16]."""
    if COUNT == 1:
        return (of_rows(at, BN),)
    elif COUNT == 2:
        return of_rows(at, BN), of_rows(at + rows, BN)
    else:
        low = of_rows(at, BN), of_rows(at + rows, BN)
        return low + (of_rows(at + 2 * rows, BN), of_rows(at + 3 * rows, BN))  # noqa: RUF005


@triton.constexpr_function
def slices_of(part, parts):
    """Return the indices of the slices in a part of a tile."""
    return list(range(8 * part // parts, 8 * (part + 1) // parts))


@triton.constexpr_function
def slice_types(half, parts):
    return (tl.float16 if half else tl.bfloat16,) * (8 // parts)


@triton.jit
def join_slices(slices, BN: tl.constexpr):
    """Put eight, four or two slices [BN, 16] side by side."""
    COUNT: tl.constexpr = len(slices)
    if COUNT == 8:
        even = tl.join(tl.join(slices[0], slices[4]), tl.join(slices[2], slices[6]))
        odd = tl.join(tl.join(slices[1], slices[5]), tl.join(slices[3], slices[7]))
        joined = tl.join(even, odd)  # row, column, j / 4, j / 2 % 2, j % 2
        return tl.reshape(tl.permute(joined, [0, 2, 3, 4, 1]), [BN, 128])
    elif COUNT == 4:
        joined = tl.join(tl.join(slices[0], slices[2]), tl.join(slices[1], slices[3]))
        return tl.reshape(tl.permute(joined, [0, 2, 3, 1]), [BN, 64])
    else:
        return tl.reshape(tl.permute(tl.join(slices[0], slices[1]), [0, 2, 1]), [BN, 32])


@triton.jit
def part_of(tile, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """Return one part of [BN, 128] along the columns, for the interpreter."""
    if PARTS == 1:
        return tile
    else:
        chosen = (tl.arange(0, PARTS) == PART)[None, :, None]
        return tl.sum(tl.where(chosen, tl.reshape(tile, [BN, PARTS, 128 // PARTS]), 0.0), axis=1)


class Form(NamedTuple):
    """Compile-time parameters of the kernel, beside the decoder.

    shared_by: assignments that share a row of x
    evict:     Triton's policy for weights
    chains:    tiles of words per iteration, each with its own sum: two chains of products hide each other's
               latency
    """

    shared_by: int
    even_k: bool
    evict: str
    bm: int
    bn: int
    chains: int
    asm: bool
    pdl: bool


@triton.jit(
    do_not_specialize=["count"],
    repr=lambda form: form.constants["DECODER"].name + "_grouped_kernel",
)
def packed_grouped_kernel(
    x, words, scale_words, factor, bias, y, assignments, block_expert, count, N, K, x_stride, rows, k_tiles,
    DECODER: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Sum acc [bn, bm] += weight tile [bn, 128] . x tile [bm, 128]^T over K; grid (blocks * row tiles).

    rows:    N padded to whole tiles of 64, for a bn that reaches beyond
    k_tiles: tiles of words along K
    """
    BM: tl.constexpr = FORM.bm
    BN: tl.constexpr = FORM.bn
    SCALE_ROWS: tl.constexpr = DECODER.scale_rows
    CHAINS: tl.constexpr = FORM.chains
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(N, BN)
    block = tl.program_id(0) // tiles
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    row = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    row_tile = tl.minimum(row // 64, rows // 64 - 1)  # past the end: the last tile again, and not stored
    column = tl.arange(0, 128)
    assignment = tl.load(assignments + block * BM + tl.arange(0, BM)).to(tl.int64)
    taken = assignment < count
    x_at = x + (assignment // FORM.shared_by)[None, :] * x_stride + column[:, None]
    word = (row_tile * k_tiles * 64 + row % 64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    words_at = words + expert * rows * k_tiles * 16 + word
    scales_at = scale_words + expert * rows * k_tiles * SCALE_ROWS + row_tile * 64 + row % 64
    accumulator = tl.zeros([BN, BM], tl.float32)
    second = tl.zeros([BN, BM], tl.float32)
    # Else ptxas sees the sums defined on a way around the loop, and has each wgmma wait for the one before.
    tl.assume(k_tiles > 0)
    for k_tile in range(0, k_tiles, CHAINS):
        for chain in tl.static_range(CHAINS):
            inside = taken[None, :]
            if not FORM.even_k:
                inside = inside & ((k_tile + chain) * 128 + column < K)[:, None]
            word = tl.load(words_at + chain * 1024, eviction_policy=FORM.evict)
            scales = load_scales(scales_at + chain * rows * SCALE_ROWS, rows, SCALE_ROWS, BN)
            x_tile = tl.load(x_at + chain * 128, mask=inside, other=0.0)
            if FORM.asm:
                weight = DECODER.unpack_in_registers(word, scales, DECODER, BN, 0, 1)
            else:
                weight = DECODER.unpack_plainly(word, scales, DECODER, BN, 0, 1)
            if chain == 0:
                accumulator = tl.dot(weight, x_tile, accumulator)
            else:
                second = tl.dot(weight, x_tile, second)
        words_at += CHAINS * 1024
        scales_at += CHAINS * rows * SCALE_ROWS
        x_at += CHAINS * 128
    if CHAINS == 2:
        accumulator += second
    if factor is not None:
        accumulator *= tl.load(factor + expert)
    if bias is not None:
        of_row = tl.load(bias + expert * N + row, mask=row < N, other=0.0)
        accumulator += of_row.to(tl.float32)[:, None]
    to = assignment[None, :] * N + row[:, None]
    tl.store(y + to, accumulator.to(y.dtype.element_ty), mask=taken[None, :] & (row < N)[:, None])


def grouped_matmul(
    x: Tensor,
    words: Tensor,
    scale_words: Tensor,
    factor: Tensor | None,
    routing: ExpertRouting,
    n: int,
    decoder: ExpertsDecoder,
    bias: Tensor | None = None,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return y [A, N], `out` if it is given; the file's docstring describes the tensors.

    `tile` overrides the table, for tuning.
    """
    k = x.shape[1]
    k_tiles = words.shape[2]
    if triton.cdiv(k, TILE_K) != k_tiles:
        raise ValueError(f"x has {k} columns, the packed experts {k_tiles} tiles of {TILE_K}")
    tile = tile or TILES[routing.bucket]
    y = torch.empty((routing.count, n), dtype=x.dtype, device=x.device) if out is None else out
    chains = 2 if routing.block_rows <= TWO_CHAINS_TO and k_tiles % 2 == 0 else 1
    capability = compute_capability(x.device)
    pdl = capability >= (9, 0)
    form = Form(
        shared_by=routing.rows_per_input(len(x)),
        even_k=k % TILE_K == 0,
        evict="evict_first" if routing.block_rows < REUSED_FROM else "",
        bm=routing.block_rows,
        bn=tile.n,
        chains=chains,
        asm=x.device.type == "cuda",
        pdl=pdl,
    )
    packed_grouped_kernel[(routing.blocks * triton.cdiv(n, tile.n),)](
        x, words, scale_words, factor, bias, y, routing.assignments, routing.block_expert, routing.count,
        n, k, x.stride(0), scale_words.shape[2], k_tiles, decoder, form,
        num_warps=tile.warps_on(capability, routing.block_rows), num_stages=tile.stages_on(capability),
        launch_pdl=pdl,
    )  # fmt: skip
    return y
