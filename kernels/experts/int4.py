"""Grouped products on INT4 experts: packing, reference, and a Triton kernel without conversions.

    x       [R, K]                          bf16 or fp16, rows contiguous; r = A // R assignments share a row
    words   int32 [E, N/64, K/128, 64, 16]  tiles of 64 rows and 128 columns, 4 KB each; the last zero-padded
    scale_words    int32 [E, K/group, N]           a row's group in a word; K and N padded to whole tiles
    bias    [E, N]                          x's dtype, or None
    y       [A, N]                          by assignment; not written where an assignment is in no block

A word of a row. Slice j of a tile's 128 columns holds columns 16j .. 16j+15; the words 2t and 2t+1 of a row
hold what column 2t and 2t+1 of every slice are:

    bit 31                                  bit 0
     | j=3  j=2  j=1  j=0 | j=3  j=2  j=1  j=0 |    word 2t: slices 0 to 3; word 2t+1: slices 4 to 7
     |   column 2t+1      |     column 2t      |

`(word >> 4j) & 0x000F000F | 0x43004300`, one shift and one lop3, is the register with columns 2t and 2t+1 of
slice j as two bf16 numbers 128 + q (fp16: 0x6400, 1024 + q). Words are read from shared memory in the very
registers in which the matrix instruction wants its first operand, so no value ever changes lanes.

A word of scale_words: the scale in the high half; in the low half, in the activations' type too,

    integer zero      -(128 + z), fp16 -(1024 + z)    w = ((128 + q) - (128 + z)) * s, rounded once
    fractional zero   (8 - z) * s                     w = ((128 + q) - 136) * s + (8 - z) * s, rounded once

Never (128 + q) * s - (128 + z) * s: in bf16 that errs by a quarter of a step. Both forms are two packed
multiply-adds for two weights. The weight is the first operand ("swap AB"), blocks as in `unquantized.py`.

Instructions of the loop a weight on sm_90, groups of 128: 2.8 for blocks of 8 assignments, 3.0 for 16,
3.3 for 32, 3.5 for 64, 4.8 for 128; 0.4 to 0.8 more in groups of 32. The unpacking is 1.9 of them.
Bytes of a decode step in groups of 128: 4.25 bits a weight of the experts taken. Sums over K run in one
order, in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_attention import compute_capability
from .routing import ExpertRouting
from .tile import Tile

TILE_N, TILE_K = 64, 128
MAX_GROUP = TILE_K
GROUPS = (32, 64, 128)
"""Group sizes as the kernel knows them; a multiple of 128 becomes groups of 128 that are alike."""

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

As tuned on an H200 for Qwen3-30B-A3B's shapes (`tests/bench/experts.py --tune`). Few experts fill the device
with small tiles; with more rows, large ones read x less often. The last spills a little, and is the fastest.
"""
REUSED_FROM = 64
"""Rows of a block from which an expert is likely to have several: its weight then stays in the cache."""


def kernel_group(group_size: int) -> int:
    """The group size that the kernel is told.

    Raises ValueError for one that is neither 32, 64, 128 nor a multiple of 128.
    """
    if group_size not in GROUPS and (group_size < MAX_GROUP or group_size % MAX_GROUP):
        raise ValueError(f"groups of {group_size}; the experts' kernel takes 32, 64 and multiples of 128")
    return min(group_size, MAX_GROUP)


def pack(
    codes: Tensor, scale: Tensor, zero: Tensor, group_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`words` and `scale_words` of a weight, for activations of `dtype`.

    codes: uint8 [E, N, K/2], low nibble is the even k; scale, zero: [E, N, K/group]; an integer `zero` gives
    the integer form, a floating one the fractional form. K must be whole groups.
    """
    kernel_group(group_size)
    words = torch.stack([_pack_words(of_expert) for of_expert in codes])
    return words, _pack_scales(scale, zero, group_size, words.shape[2], dtype)


def _pack_words(codes: Tensor) -> Tensor:
    """Of one expert: uint8 [N, K/2] to int32 [N/64, K/128, 64, 16]."""
    codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1)
    n, k = codes.shape
    tiles_n, tiles_k = triton.cdiv(n, TILE_N), triton.cdiv(k, TILE_K)
    codes = torch.nn.functional.pad(codes, (0, tiles_k * TILE_K - k, 0, tiles_n * TILE_N - n))
    parts = codes.view(tiles_n, TILE_N, tiles_k, 2, 4, 8, 2)  # tile, row, tile, j / 4, j % 4, t, column % 2
    ordered = parts.permute(0, 2, 1, 5, 3, 6, 4).reshape(tiles_n, tiles_k, TILE_N, 64, 2)
    return (ordered[..., 0] | (ordered[..., 1] << 4)).view(torch.int32)


def _pack_scales(scale: Tensor, zero: Tensor, group_size: int, tiles_k: int, dtype: torch.dtype) -> Tensor:
    if group_size > MAX_GROUP:
        repeats = group_size // MAX_GROUP
        scale, zero = scale.repeat_interleave(repeats, 2), zero.repeat_interleave(repeats, 2)
    experts, n, groups = scale.shape
    high = scale.to(dtype)
    if zero.dtype.is_floating_point:
        low = ((8.0 - zero.float()) * high.float()).to(dtype)
    else:
        low = (-magic(dtype) - zero.float()).to(dtype)
    word = (high.view(torch.int16).int() << 16) | (low.view(torch.int16).int() & 0xFFFF)
    padded = tiles_k * TILE_K // kernel_group(group_size), triton.cdiv(n, TILE_N) * TILE_N
    scale_words = torch.zeros((experts, *padded), dtype=torch.int32, device=scale.device)
    scale_words[:, :groups, :n] = word.transpose(1, 2)
    return scale_words


def magic(dtype: torch.dtype) -> float:
    """The number whose last four bits of mantissa hold a code: 2 to the bits of mantissa."""
    return 1024.0 if dtype == torch.float16 else 128.0


def reference_weight(
    words: Tensor, scale_words: Tensor, n: int, group_size: int, fractional: bool, dtype: torch.dtype
) -> Tensor:
    """The weight the kernel multiplies by, [E, N, K] in `dtype`, K in whole tiles; undoes `pack`."""
    experts, tiles_n, tiles_k = words.shape[:3]
    octets = words.contiguous().view(torch.uint8).view(experts, tiles_n, tiles_k, TILE_N, 8, 2, 2, 2)
    nibbles = torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2)
    parts = nibbles.permute(0, 1, 3, 2, 5, 7, 4, 6)
    codes = parts.reshape(experts, tiles_n * TILE_N, tiles_k * TILE_K).float()
    high, low = (
        part.to(torch.int16)
        .view(dtype)
        .float()
        .transpose(1, 2)
        .repeat_interleave(kernel_group(group_size), 2)
        for part in (scale_words >> 16, scale_words)
    )
    weight = (codes - 8.0) * high + low if fractional else (codes + (low + magic(dtype))) * high
    return weight.to(dtype)[:, :n]


@triton.constexpr_function
def unpack_asm(group_size, fractional, half):
    """PTX from two words of a row, and its words of scale_words, to the eight registers of its slices."""
    kind = "f16x2" if half else "bf16x2"
    code, one, centre = (
        ("0x64006400", "0x3C003C00", "0xE408E408") if half else ("0x43004300", "0x3F803F80", "0xC308C308")
    )
    lines = [".reg .b32 t, scale, low, one, centre, nothing;"]
    lines += [f"mov.b32 one, {one};", f"mov.b32 centre, {centre};", "mov.b32 nothing, 0x80008000;"]
    for j in range(8):
        if j * 16 % group_size == 0:
            scale_words = f"${10 + 2 * (j * 16 // group_size)}"
            lines += [
                f"prmt.b32 low, {scale_words}, 0, 0x1010;",
                f"prmt.b32 scale, {scale_words}, 0, 0x3232;",
            ]
        source = f"${8 + j // 4}"
        if j % 4:
            lines.append(f"shr.u32 t, {source}, {4 * (j % 4)};")
            source = "t"
        lines.append(f"lop3.b32 t, {source}, 0x000F000F, {code}, 0xEA;")
        lines.append(f"fma.rn.{kind} t, t, one, {'centre' if fractional else 'low'};")
        lines.append(f"fma.rn.{kind} ${j}, t, scale, {'low' if fractional else 'nothing'};")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def unpack_constraints(group_size):
    return ",".join(["=&r"] * 8 + ["r"] * (2 + 2 * (128 // group_size)))


@triton.constexpr_function
def slice_types(half):
    return (tl.float16 if half else tl.bfloat16,) * 8


@triton.jit
def unpack_in_registers(
    words, scale_words, GROUP: tl.constexpr, FRACTIONAL: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr
):
    """The tile [BN, 128] of words [BN, 16] and one to four scale_words [BN, 16], joined last."""
    asm: tl.constexpr = unpack_asm(GROUP, FRACTIONAL, HALF)
    constraints: tl.constexpr = unpack_constraints(GROUP)
    types: tl.constexpr = slice_types(HALF)
    inputs = (words,) + scale_words  # noqa: RUF005
    part = tl.inline_asm_elementwise(asm, constraints, inputs, dtype=types, is_pure=True, pack=2)
    even = tl.join(tl.join(part[0], part[4]), tl.join(part[2], part[6]))
    odd = tl.join(tl.join(part[1], part[5]), tl.join(part[3], part[7]))
    slices = tl.join(even, odd)  # row, column, j / 4, j / 2 % 2, j % 2
    return tl.reshape(tl.permute(slices, [0, 2, 3, 4, 1]), [BN, 128])


@triton.jit
def unpack_plainly(
    words, scale_words, GROUP: tl.constexpr, FRACTIONAL: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr
):
    """The same without PTX: for the interpreter."""
    DTYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    word = tl.reshape(words, [BN, 8, 2, 1, 1])  # row, t, j / 4
    shift = tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 4)[None, :] * 4
    code = (word >> tl.reshape(shift, [1, 1, 1, 2, 4])) & 0xF  # ..., column % 2, j % 4
    code = tl.reshape(tl.permute(code, [0, 2, 4, 1, 3]), [BN, 128]).to(tl.float32)
    group = (tl.arange(0, 128) // GROUP)[None, :]
    word = tl.zeros([BN, 128], tl.int32)
    for i in tl.static_range(128 // GROUP):
        word = tl.where(group == i, tl.max(scale_words[i], axis=1)[:, None], word)
    scale = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    low = word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    if FRACTIONAL:
        weight = (code - 8.0) * scale + low
    else:
        weight = (code + (low + (1024.0 if HALF else 128.0))) * scale
    return weight.to(DTYPE)


@triton.jit
def of_rows(at, BN: tl.constexpr):
    """A row's word of scale_words for each of its words."""
    return tl.broadcast_to(tl.load(at)[:, None], [BN, 16])


@triton.jit
def load_scales(at, rows, GROUP: tl.constexpr, BN: tl.constexpr):
    """Meta of the groups of one tile of words, each [BN, 16]."""
    if GROUP == 128:
        return (of_rows(at, BN),)
    elif GROUP == 64:
        return of_rows(at, BN), of_rows(at + rows, BN)
    else:
        low = of_rows(at, BN), of_rows(at + rows, BN)
        return low + (of_rows(at + 2 * rows, BN), of_rows(at + 3 * rows, BN))  # noqa: RUF005


@triton.jit(do_not_specialize=["count"])
def int4_grouped_kernel(
    x, words, scale_words, bias, y, assignments, block_expert, count, N, K, x_stride, rows, k_tiles,
    SHARED_BY: tl.constexpr, EVEN_K: tl.constexpr, GROUP: tl.constexpr, FRACTIONAL: tl.constexpr,
    EVICT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHAINS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] += weight tile [BN, 128] . x tile [BM, 128]^T over K; grid (blocks * row tiles).

    rows: N padded to whole tiles of 64, where BN may reach beyond; k_tiles: tiles of words along K
    CHAINS: tiles of words a turn, each added up by itself: two chains of products hide each other's latency
    """
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    if PDL:
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
    x_at = x + (assignment // SHARED_BY)[None, :] * x_stride + column[:, None]
    word = (row_tile * k_tiles * 64 + row % 64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    words_at = words + expert * rows * k_tiles * 16 + word
    scales_at = scale_words + expert * rows * k_tiles * (128 // GROUP) + row_tile * 64 + row % 64
    accumulator = tl.zeros([BN, BM], tl.float32)
    second = tl.zeros([BN, BM], tl.float32)
    # Else ptxas sees the sums defined on a way around the loop, and has each wgmma wait for the one before.
    tl.assume(k_tiles > 0)
    for k_tile in range(0, k_tiles, CHAINS):
        for chain in tl.static_range(CHAINS):
            inside = taken[None, :]
            if not EVEN_K:
                inside = inside & ((k_tile + chain) * 128 + column < K)[:, None]
            word = tl.load(words_at + chain * 1024, eviction_policy=EVICT)
            scales = load_scales(scales_at + chain * rows * (128 // GROUP), rows, GROUP, BN)
            x_tile = tl.load(x_at + chain * 128, mask=inside, other=0.0)
            if ASM:
                weight = unpack_in_registers(word, scales, GROUP, FRACTIONAL, HALF, BN)
            else:
                weight = unpack_plainly(word, scales, GROUP, FRACTIONAL, HALF, BN)
            if chain == 0:
                accumulator = tl.dot(weight, x_tile, accumulator)
            else:
                second = tl.dot(weight, x_tile, second)
        words_at += CHAINS * 1024
        scales_at += CHAINS * rows * (128 // GROUP)
        x_at += CHAINS * 128
    if CHAINS == 2:
        accumulator += second
    if bias is not None:
        of_row = tl.load(bias + expert * N + row, mask=row < N, other=0.0)
        accumulator += of_row.to(tl.float32)[:, None]
    to = assignment[None, :] * N + row[:, None]
    tl.store(y + to, accumulator.to(y.dtype.element_ty), mask=taken[None, :] & (row < N)[:, None])


def grouped_matmul(
    x: Tensor,
    words: Tensor,
    scale_words: Tensor,
    routing: ExpertRouting,
    n: int,
    group_size: int,
    fractional: bool,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """y [A, N]; shapes as in the file's docstring. `tile` overrides the table, for tuning."""
    k = x.shape[1]
    k_tiles = words.shape[2]
    if triton.cdiv(k, TILE_K) != k_tiles:
        raise ValueError(f"x has {k} columns, the packed experts {k_tiles} tiles of {TILE_K}")
    tile = tile or TILES[routing.bucket]
    y = torch.empty((routing.count, n), dtype=x.dtype, device=x.device)
    chains = 2 if routing.block_rows <= TWO_CHAINS_TO and k_tiles % 2 == 0 else 1
    capability = compute_capability(x.device)
    pdl = capability >= (9, 0)
    int4_grouped_kernel[(routing.blocks * triton.cdiv(n, tile.n),)](
        x, words, scale_words, bias, y, routing.assignments, routing.block_expert, routing.count,
        n, k, x.stride(0), scale_words.shape[2], k_tiles,
        SHARED_BY=routing.rows_per_input(len(x)), EVEN_K=k % TILE_K == 0,
        GROUP=kernel_group(group_size), FRACTIONAL=fractional,
        EVICT="evict_first" if routing.block_rows < REUSED_FROM else "",
        BM=routing.block_rows, BN=tile.n, CHAINS=chains, ASM=x.device.type == "cuda", PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages_on(capability), launch_pdl=pdl,
    )  # fmt: skip
    return y
