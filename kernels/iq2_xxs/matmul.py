"""The IQ2_XXS product on Hopper for few rows of x: the weight decoded in registers, straight into `mma.sync`.

    y [M, N] = x [M, K] @ w.T        words, scales: `packing.py`        decoding: `decoder.py`

The weight is the product's M operand, 16 rows a strip; x its N operand, 8 rows a tile. A warp has some strips
and, of K, every so many super-blocks of 256; a CTA's warps add their sums up at the end of a tile, CTAs that
share a tile leave theirs in memory, and the last one adds them in order. CTAs stay for several tiles, so the
codebook is copied to shared memory once. Words are on their way a super-block or two before they are decoded.

With one row of x, the product's 8 columns are 8 blocks of 32 columns of K instead of 8 rows of x: every
block's sum stays apart until the super-block ends, and is then scaled in the very lane that has its scale.

What bounds it, in weights for each SM and clock (4.3 TB/s, 1.98 GHz, 132 SMs): 64 by bytes from HBM, 0.258
each; 64 by look-ups, 16 bytes for 8 weights of 128 a clock; 42 to 48 by issue slots, 128 a clock over the 2.7
to 3.0 instructions a weight of the loop with one row of x (`tests/kernels/test_iq2_xxs_compiles.py` counts).
"""

# A kernel has no `(*several, one)`, and its tuples grow while it is compiled.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated"

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decoder import add_own_scaled, add_scaled, decode, multiply, prepare
from .packing import STRIP, SUPER_BLOCK

SMS = 132
MAX_SPLITS = 8
MAX_TILE_ROWS = 64


@gluon.jit
def fill_codebook(codebook, WARPS: gl.constexpr):
    """Copy the codebook [256, 8], 16-bit numbers seen as int32 [256, 4], eight times to shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    entry = gl.arange(0, 256, gl.SliceLayout(1, layout))
    word = gl.arange(0, 32, gl.SliceLayout(0, layout))
    values = gl.load(codebook + entry[:, None] * 4 + word[None, :] % 4)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    table = gl.allocate_shared_memory(gl.int32, [256, 64], shared)
    table.slice(0, 32, dim=1).store(values)
    return table


@gluon.jit
def load_words(words, scales, strip, super_block, K, wanted, thread, LAYOUT: gl.constexpr):
    """A lane's words of both chunks of a super-block, int32 [threads, 4] each, and its fp16 scales."""
    lane = thread % 32
    places = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]
    first = ((strip * (K // 128) + super_block * 2) * 32 + lane)[:, None] * 4 + places
    inside = wanted[:, None] & (places >= 0)
    low = gl.load(words + first, mask=inside, other=0, eviction_policy="evict_first")
    high = gl.load(words + first + 128, mask=inside, other=0, eviction_policy="evict_first")
    scale = gl.load(scales + (strip * (K // 256) + super_block) * 8 + lane // 4, mask=wanted, other=0)
    return low, high, scale[:, None] + places * 0


@gluon.jit
def load_x(x, row, column, K, M, wanted, LAYOUT: gl.constexpr):
    """Eight numbers of x from `column` on, as int32 [threads, 4]."""
    places = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (wanted & (row < M))[:, None] & (places >= 0)
    return gl.load(x + (row * (K // 2) + column // 2)[:, None] + places, mask=inside, other=0)


@gluon.jit
def copies_of(value, COUNT: gl.constexpr):
    values = ()
    for _ in gl.static_range(COUNT):
        values = values + (value,)
    return values


@gluon.jit
def sum_warps(total, ONE: gl.constexpr, WN: gl.constexpr, WK: gl.constexpr):
    """A strip of every warp along N, added up over the warps along K: fp32 [1 or 8 rows of x, WN * 16]."""
    parts = gl.reshape(total, [WN, WK, 8, 4, 2, 2])  # warps; lanes g, t; upper rows; odd columns
    TOKENS: gl.constexpr = 1 if ONE else 8
    if ONE:
        sums = gl.permute(gl.sum(gl.sum(gl.sum(parts, 5), 3), 1), [0, 2, 1])
    else:
        sums = gl.permute(gl.sum(parts, 1), [2, 4, 0, 3, 1])
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WN * WK, 1], [1, 0])
    return gl.convert_layout(gl.reshape(sums, [TOKENS, WN * 16]), layout)


@gluon.jit
def places_of(first_row, first_token, M, N, ONE: gl.constexpr, WN: gl.constexpr, WK: gl.constexpr):
    """Where what `sum_warps` returns lies in y, and which of it does."""
    TOKENS: gl.constexpr = 1 if ONE else 8
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WN * WK, 1], [1, 0])
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))[:, None]
    row = first_row + gl.arange(0, WN * 16, gl.SliceLayout(0, layout))[None, :]
    return token * N + row, (row < N) & (token < M)


@gluon.jit
def iq2_xxs_kernel(
    x, words, scales, codebook, y, partials, semaphores, M, N, K, units,
    TOKEN_TILES: gl.constexpr, STRIPS: gl.constexpr, WN: gl.constexpr, WK: gl.constexpr,
    SPLITS: gl.constexpr, AHEAD: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """x, y: [M, K], [M, N], x seen as int32; partials: fp32 [SPLITS, M, N]; semaphores: zeros, one a tile.

    TOKEN_TILES: rows of x in eights, 0 for a single one. A unit is one of SPLITS parts of K of a tile.
    """
    ONE: gl.constexpr = TOKEN_TILES == 0
    TOTALS: gl.constexpr = 1 if ONE else TOKEN_TILES
    X_BLOCKS: gl.constexpr = 4 if TOTALS <= 2 else 8 // TOTALS
    LOADS: gl.constexpr = 3 * STRIPS + (1 if ONE else 0)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WN * WK, 1], [1, 0])
    gdc_launch_dependents()
    thread = gl.arange(0, WN * WK * 32, gl.SliceLayout(1, LAYOUT))
    lane, warp = thread % 32, thread // 32
    group, vector = lane // 4, lane % 4
    warp_n, warp_k = warp // WK, warp % WK
    lane_offset = (lane % 8 * 16)[:, None] + gl.full([WN * WK * 32, 4], 0, gl.int32, LAYOUT)
    zero = gl.full([WN * WK * 32, 4], 0.0, gl.float32, LAYOUT)
    # With one row, column g of the product is block g / 2 of the low chunk, for an odd g of the high one.
    own_column = (group // 2) * 32 + (group % 2) * 128 + vector * 8

    super_blocks = K // 256
    steps = gl.cdiv(super_blocks, WK * SPLITS)
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    strips = gl.cdiv(N, 16)
    table = fill_codebook(codebook, WN * WK)
    gdc_wait()

    queue = ()
    front, front_step = program, 0
    for _ in gl.static_range(AHEAD):
        front_block = (front_step * SPLITS + front % SPLITS) * WK + warp_k
        inside = (front_block < super_blocks) & (front < units)
        for r in gl.static_range(STRIPS):
            strip = (front // SPLITS * STRIPS + r) * WN + warp_n
            queue = queue + load_words(
                words, scales, strip, front_block, K, inside & (strip < strips), thread, LAYOUT
            )
        if ONE:
            queue = queue + (load_x(x, group * 0, front_block * 256 + own_column, K, M, inside, LAYOUT),)
        is_last = front_step == steps - 1
        front = gl.where(is_last, front + programs, front)
        front_step = gl.where(is_last, 0, front_step + 1)
    totals = copies_of(zero, STRIPS * TOTALS)
    gl.thread_barrier()

    unit, step = program, 0
    for _ in range(gl.cdiv(units - program, programs) * steps):
        now = queue[:LOADS]
        queue = queue[LOADS:]
        front_block = (front_step * SPLITS + front % SPLITS) * WK + warp_k
        inside = (front_block < super_blocks) & (front < units)
        for r in gl.static_range(STRIPS):
            strip = (front // SPLITS * STRIPS + r) * WN + warp_n
            queue = queue + load_words(
                words, scales, strip, front_block, K, inside & (strip < strips), thread, LAYOUT
            )
        if ONE:
            queue = queue + (load_x(x, group * 0, front_block * 256 + own_column, K, M, inside, LAYOUT),)
        is_last = front_step == steps - 1
        front = gl.where(is_last, front + programs, front)
        front_step = gl.where(is_last, 0, front_step + 1)

        super_block = (step * SPLITS + unit % SPLITS) * WK + warp_k
        inside = super_block < super_blocks
        column = super_block * 256 + vector * 8
        sums = totals
        if ONE:
            sums = copies_of(zero, STRIPS)
        prepared = ()
        for r in gl.static_range(STRIPS):
            prepared = prepared + prepare(now[3 * r], now[3 * r + 2])
            prepared = prepared + prepare(now[3 * r + 1], now[3 * r + 2])
        operands = ()
        for block in gl.static_range(8):
            if ONE:
                mine = group == 2 * (block % 4) + block // 4
                operands = (gl.where(mine[:, None], now[LOADS - 1], 0),)
            elif block % X_BLOCKS == 0:
                operands = ()
                for later in gl.static_range(X_BLOCKS):
                    for t in gl.static_range(TOTALS):
                        place = column + (block + later) * 32
                        one = load_x(x, t * 8 + group, place, K, M, inside, LAYOUT)
                        operands = operands + (one,)
            done = ()
            for r in gl.static_range(STRIPS):
                words_of, factors = prepared[4 * r + 2 * (block // 4)], prepared[4 * r + 2 * (block // 4) + 1]
                first, second = decode(words_of, lane_offset, block % 4)
                if ONE:
                    done = done + (multiply(first, second, operands[0], sums[r], HALF),)
                else:
                    for t in gl.static_range(TOTALS):
                        one = operands[block % X_BLOCKS * TOTALS + t]
                        product = multiply(first, second, one, zero, HALF)
                        done = done + (add_scaled(sums[r * TOTALS + t], product, factors, block % 4),)
            sums = done
        if ONE:
            done = ()
            for r in gl.static_range(STRIPS):
                done = done + (add_own_scaled(totals[r], sums[r], prepared[4 * r + 1], prepared[4 * r + 3]),)
            sums = done
        totals = sums

        is_done = step == steps - 1
        if is_done:
            tile, split = unit // SPLITS, unit % SPLITS
            for r in gl.static_range(STRIPS):
                for t in gl.static_range(TOTALS):
                    answer = sum_warps(totals[r * TOTALS + t], ONE, WN, WK)
                    target, there = places_of((tile * STRIPS + r) * WN * 16, t * 8, M, N, ONE, WN, WK)
                    if SPLITS == 1:
                        gl.store(y + target, answer.to(y.dtype.element_ty), mask=there)
                    else:
                        gl.store(partials + split * (M * N) + target, answer, mask=there)
            if SPLITS > 1:
                gl.thread_barrier()
                arrived = gl.atomic_add(semaphores + tile, 1, sem="acq_rel", scope="gpu")
                if arrived == SPLITS - 1:
                    # Whoever comes last adds all parts up in their order: the bits do not depend on who.
                    for r in gl.static_range(STRIPS):
                        for t in gl.static_range(TOTALS):
                            target, there = places_of((tile * STRIPS + r) * WN * 16, t * 8, M, N, ONE, WN, WK)
                            answer = gl.load(partials + target, mask=there, cache_modifier=".cg")
                            for part in gl.static_range(1, SPLITS):
                                answer += gl.load(
                                    partials + part * (M * N) + target, mask=there, cache_modifier=".cg"
                                )
                            gl.store(y + target, answer.to(y.dtype.element_ty), mask=there)
                    gl.store(semaphores + tile, 0)
            totals = copies_of(zero, STRIPS * TOTALS)
        step = gl.where(is_done, 0, step + 1)
        unit = gl.where(is_done, unit + programs, unit)
    table._keep_alive()


@dataclass(frozen=True)
class Tile:
    """How a launch is cut.

    token_tiles     rows of x in eights, 0 for a single one
    strips          of 16 rows of the weight, of each warp
    warps_n, warps_k, ctas_per_sm
    ahead           super-blocks whose words are on their way while one is multiplied
    """

    token_tiles: int
    strips: int
    warps_n: int
    warps_k: int
    ctas_per_sm: int
    ahead: int = 1

    @property
    def rows(self) -> int:
        """Of the weight, in a CTA's tile."""
        return STRIP * self.strips * self.warps_n

    def splits(self, n: int, k: int) -> int:
        """CTAs that share a tile along K: as many as run at once and have work for every warp."""
        tiles = triton.cdiv(n, self.rows)
        room = min(SMS * self.ctas_per_sm // tiles, k // SUPER_BLOCK // self.warps_k, MAX_SPLITS)
        return 1 << max(0, room.bit_length() - 1)

    def constants(self, splits: int, half: bool) -> dict[str, object]:
        return {
            "TOKEN_TILES": self.token_tiles, "STRIPS": self.strips, "WN": self.warps_n, "WK": self.warps_k,
            "SPLITS": splits, "AHEAD": self.ahead, "HALF": half,
        }  # fmt: skip

    def options(self) -> dict[str, object]:
        warps = self.warps_n * self.warps_k
        registers = min(255, 65536 // (warps * 32 * self.ctas_per_sm) // 8 * 8)
        return {"num_warps": warps, "maxnreg": registers, "launch_pdl": True}


ONE_ROW = {2 * SMS * STRIP: Tile(0, 1, 1, 8, 2), 6 * SMS * STRIP: Tile(0, 1, 1, 8, 3)}
"""For one row of x, by the rows of the weight, at most: a strip for each CTA; up to two."""
TILES = {
    1: Tile(0, 2, 1, 4, 3),
    8: Tile(1, 2, 2, 4, 1, ahead=2),
    16: Tile(2, 2, 4, 2, 1),
    32: Tile(4, 2, 4, 2, 1),
    64: Tile(8, 2, 4, 2, 1),
}
"""By the rows of x, at most. What chose them is in `tests/bench/results/iq2_xxs_log.md`."""
SEMAPHORES = 512
"""Tiles of a launch that is split along K, at most: two CTAs for each still run at once."""


def launch(
    x: Tensor, words: Tensor, scales: Tensor, codebook: Tensor, semaphores: Tensor, y: Tensor, tile: Tile
) -> None:
    """x [M, K] @ w.T into y [M, N] in one launch; M at most what the tile takes.

    semaphores: int32 [SEMAPHORES], zeros before and after
    """
    (m, k), n = x.shape, y.shape[1]
    splits = tile.splits(n, k)
    units = triton.cdiv(n, tile.rows) * splits
    scratch = splits * m * n if splits > 1 else 1
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    iq2_xxs_kernel[(min(units, SMS * tile.ctas_per_sm),)](
        x.view(torch.int32), words, scales, codebook.view(torch.int32), y, partials, semaphores,
        m, n, k, units, **tile.constants(splits, x.dtype is torch.float16), **tile.options(),
    )  # fmt: skip


def tile_for(m: int, n: int) -> Tile:
    """What is launched for x [m, K] and a weight [n, K]; m is at most MAX_TILE_ROWS."""
    if m == 1:
        return next((tile for most, tile in ONE_ROW.items() if n <= most), TILES[1])
    return next(tile for most, tile in TILES.items() if m <= most)


def matmul(x: Tensor, words: Tensor, scales: Tensor, codebook: Tensor, semaphores: Tensor, n: int) -> Tensor:
    """y [M, n] = x [M, K] @ w.T; x bf16 or fp16, contiguous, on 16 bytes; codebook [256, 8] in its dtype."""
    m = x.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    for first in range(0, m, MAX_TILE_ROWS):
        part = slice(first, min(m, first + MAX_TILE_ROWS))
        tile = tile_for(part.stop - first, n)
        launch(x[part], words, scales, codebook, semaphores, y[part], tile)
    return y
