"""The IQ2_XXS product with one row of x on Hopper: the weight decoded in registers, straight into `mma.sync`.

    y [1, N] = x [1, K] @ w.T        words, scales: `packing.py`        look-ups: `lookup.py`

The weight is the product's M operand, a strip of 16 rows. The product's 8 columns are not rows of x but the 8
blocks of 32 columns of a super-block: column c is x in block c and zero elsewhere. The sum of every block
therefore stays separate until the super-block ends, and is then scaled in a lane that has the block's scale.

A warp handles some strips and every n-th super-block of 256 columns of K; a CTA's warps add their sums at the
end of a tile, CTAs that share a tile write sums to memory, and the last CTA adds these in order. CTAs stay
for several tiles, so the codebook is copied to shared memory once. The data of a super-block is requested one
or two super-blocks before it is decoded. For more rows of x the stream-K kernel of `hopper/` is faster.
"""

# A kernel has no `(*several, one)`, and its tuples grow while it is compiled.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated"

from dataclasses import dataclass

import torch
from torch import Tensor

from ..hopper.packed_operand import PackedOperand
from ..hopper.ptx import ptx
from ..hopper.tile import NUM_SMS
from ..triton_imports import gdc_launch_dependents, gdc_wait, gl, gluon, thread_barrier, triton
from .lookup import DECLARATIONS, fill_table, load_lines, sign_lines
from .packing import SUPER_BLOCK

STRIP = 16
MAX_SPLITS = 8


@gluon.constexpr_function
def load_asm(results, offsets):
    """Load `results` words of each thread from `$address0`, eight bytes at each of the offsets, or zeros."""
    names = [f"$word{i}" for i in range(results)]
    each = results // len(offsets)
    lines = [".reg .pred p;", "setp.ne.b32 p, $wanted0, 0;", *(f"mov.b32 {name}, 0;" for name in names)]
    for i, offset in enumerate(offsets):
        some = ",".join(names[each * i : each * (i + 1)])
        lines.append(f"@p ld.global.L1::no_allocate.v{each}.b32 {{{some}}}, [$address0+{offset}];")
    return ptx(f"word*{results} address*4 wanted*4", *lines)


@gluon.jit
def load_words(address, wanted):
    """Load a lane's words of a super-block's four tiles: words of tiles 0 and 1, words of tiles 2 and 3."""
    asm: gl.constexpr = load_asm(8, (0, 1024, 2048, 3072))
    return gl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r", [address, wanted],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def load_scales_asm():
    return ptx(
        "word*4 address*4 wanted*4",
        ".reg .pred p;", "setp.ne.b32 p, $wanted0, 0;", "mov.b32 $word0, 0;", "mov.b32 $word1, 0;",
        "@p ld.global.L1::no_allocate.v2.b32 {$word0,$word1}, [$address0];",
        "mov.b32 $word2, $word0;", "mov.b32 $word3, $word1;",
    )  # fmt: skip


@gluon.jit
def load_scales(address, wanted):
    """Load the scales of a lane's own two blocks; return each twice."""
    return gl.inline_asm_elementwise(
        load_scales_asm(), "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r", [address, wanted],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def load_x(address, wanted):
    """Load the eight numbers of x that belong to a lane's own vector and column."""
    asm: gl.constexpr = load_asm(4, (0,))
    return gl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r", [address, wanted], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.constexpr_function
def decode_asm(which):
    """Return the A operands of one block: pairs 0 and 1 of both rows, and pairs 2 and 3."""
    lines = list(DECLARATIONS)
    for row in (0, 1):
        outs = [f"${half}{row + k}" for half in ("first", "second") for k in (0, 2)]
        lines += load_lines(outs, f"$word{which}", row, "$copy0", 0)
        for pair, out in enumerate(outs):
            lines += sign_lines(out, f"$word{which}", row, pair)
    return ptx("first*4 second*4 word*4 copy*4", *lines)


@gluon.jit
def decode(words, copy, WHICH: gl.constexpr):
    asm: gl.constexpr = decode_asm(WHICH)
    return gl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [words, copy],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def multiply_asm(half, second):
    kind = "f16" if half else "bf16"
    sums, before = "{$sum0,$sum1,$sum2,$sum3}", "{$before0,$before1,$before2,$before3}"
    x = "{$x2,$x3}" if second else "{$x0,$x1}"
    weights = "{$w0,$w1,$w2,$w3}"
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {sums}, {weights}, {x}, {before};"
    return ptx("sum*4 w*4 x*4 before*4", mma)


@gluon.jit
def multiply(weights, x, before, SECOND: gl.constexpr, HALF: gl.constexpr):
    """Add half a block's product to `before`: 16 rows of the weight, 8 columns."""
    asm: gl.constexpr = multiply_asm(HALF, SECOND)
    return gl.inline_asm_elementwise(
        asm, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f", [weights, x, before],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def add_scaled_asm(half):
    """Return PTX that adds scaled sums. Columns 2t and 2t+1 are blocks 0 and 1 of tile t; sums 0 and 1 belong
    to row g, sums 2 and 3 to row g+8.
    """
    lines = [".reg .f32 f, s;", ".reg .b16 low, high;"]
    for i in range(4):
        part = "high" if i > 1 else "low"
        lines.append(f"mov.b32 {{low, high}}, $scale{i % 2};")
        lines.append(f"cvt.f32.f16 f, {part};" if half else f"mov.b32 f, {{0, {part}}};")
        lines += [f"add.f32 s, $first{i}, $second{i};", f"fma.rn.f32 $total{i}, s, f, $before{i};"]
    if not half:
        lines = [line.replace("{0, ", "{zero, ") for line in lines]
        lines = [".reg .b16 zero;", "mov.b16 zero, 0;", *lines]
    return ptx("total*4 first*4 second*4 scale*4 before*4", *lines)


@gluon.jit
def add_scaled(before, first, second, scales, HALF: gl.constexpr):
    """Add both halves' sums times the scales of a lane's own blocks to `before`."""
    return gl.inline_asm_elementwise(
        add_scaled_asm(HALF), "=&f,=&f,=&f,=&f," + "f," * 8 + "r,r,r,r,f,f,f,f",
        [first, second, scales, before], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def copies_of(value, COUNT: gl.constexpr):
    values = ()
    for _ in gl.static_range(COUNT):
        values = values + (value,)
    return values


@gluon.jit
def sum_warps(total, WN: gl.constexpr, WK: gl.constexpr):
    """Return a strip of every warp along N, added up over warps along K and columns: fp32 [1, WN * 16]."""
    parts = gl.reshape(total, [WN, WK, 8, 4, 2, 2])  # warps; lanes g, t; upper rows; odd columns
    sums = gl.permute(gl.sum(gl.sum(gl.sum(parts, 5), 3), 1), [0, 2, 1])
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WN * WK, 1], [1, 0])
    return gl.convert_layout(gl.reshape(sums, [1, WN * 16]), layout)


@gluon.jit
def rows_of(first_row, N, WN: gl.constexpr, WK: gl.constexpr):
    """Return the places in y of the result of `sum_warps`, and which of them exist."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WN * WK, 1], [1, 0])
    row = first_row + gl.arange(0, WN * 16, gl.SliceLayout(0, layout))[None, :]
    return row, row < N


@gluon.jit
def load_next(
    queue, unit, step, steps, units, operands, lane, warp_n, warp_k, N, K, STRIPS: gl.constexpr,
    WN: gl.constexpr, WK: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Add a warp's loads for one step of a unit to `queue`: words and scales of its strips, then x. Return
    the next step.

    operands, lane: addresses of x, words and scales, and byte offsets of a lane behind them
    """
    x, words, scales = operands
    lane_x, lane_words, lane_scales = lane
    super_block = (step * SPLITS + unit % SPLITS) * WK + warp_k
    wanted = (super_block < K // 256) & (unit < units)
    for r in gl.static_range(STRIPS):
        strip = (unit // SPLITS * STRIPS + r) * WN + warp_n
        tile = (strip // 4) * (K // 64) + super_block * 4
        inside = (wanted & (strip < gl.cdiv(N, 16))).to(gl.int32)
        low, high = load_words(words + (tile * 1024 + strip % 4 * 256 + lane_words), inside)
        scale = load_scales(scales + (tile * 256 + strip % 4 * 64 + lane_scales), inside)
        queue = queue + (low, high, scale)
    queue = queue + (load_x(x + (super_block * 512 + lane_x), wanted.to(gl.int32)),)
    is_last = step == steps - 1
    unit = gl.where(is_last, unit + gl.num_programs(0), unit)
    return queue, unit, gl.where(is_last, 0, step + 1)


@gluon.jit(do_not_specialize=["units"])
def iq2_xxs_one_row_kernel(
    x, words, scales, factor, codebook, y, partials, semaphores, N, K, units,
    STRIPS: gl.constexpr, WN: gl.constexpr, WK: gl.constexpr, SPLITS: gl.constexpr, AHEAD: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """partials: fp32 [SPLITS, N]; semaphores: zeros, one a tile. A unit is a tile's K, or a part of it."""
    LOADS: gl.constexpr = 3 * STRIPS + 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WN * WK, 1], [1, 0])
    gdc_launch_dependents()
    thread = gl.arange(0, WN * WK * 32, gl.SliceLayout(1, LAYOUT))[:, None]
    thread = thread + gl.full([WN * WK * 32, 4], 0, gl.int32, LAYOUT)
    lane, warp = thread % 32, thread // 32
    group, vector = lane // 4, lane % 4
    warp_n, warp_k = warp // WK, warp % WK
    copy = lane % 8 * 16
    zero = gl.full([WN * WK * 32, 4], 0.0, gl.float32, LAYOUT)
    lane_offsets = (group * 64 + vector * 16, lane * 8, vector * 256 + group * 8)
    operands = (x.to(gl.int64), words.to(gl.int64), scales.to(gl.int64))

    steps = gl.cdiv(K // 256, WK * SPLITS)
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    table = gl.allocate_shared_memory(gl.int32, [1, 256, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    fill_table(table, codebook, 256, WN * WK)
    gdc_wait()

    queue = ()
    front, front_step = program, 0
    for _ in gl.static_range(AHEAD):
        queue, front, front_step = load_next(
            queue, front, front_step, steps, units, operands, lane_offsets, warp_n, warp_k, N, K, STRIPS, WN,
            WK, SPLITS,
        )  # fmt: skip
    totals = copies_of(zero, STRIPS)
    thread_barrier()

    unit, step = program, 0
    for _ in range(gl.cdiv(units - program, programs) * steps):
        now = queue[:LOADS]
        queue = queue[LOADS:]
        queue, front, front_step = load_next(
            queue, front, front_step, steps, units, operands, lane_offsets, warp_n, warp_k, N, K, STRIPS, WN,
            WK, SPLITS,
        )  # fmt: skip

        firsts = copies_of(zero, STRIPS)
        seconds = copies_of(zero, STRIPS)
        for block in gl.static_range(8):
            column = gl.where(group == block, now[LOADS - 1], 0)
            for r in gl.static_range(STRIPS):
                first, second = decode(now[3 * r + block // 4], copy, block % 4)
                # The tuples rotate: after all strips each is in its place.
                firsts = firsts[1:] + (multiply(first, column, firsts[0], False, HALF),)
                seconds = seconds[1:] + (multiply(second, column, seconds[0], True, HALF),)
        for r in gl.static_range(STRIPS):
            totals = totals[1:] + (add_scaled(totals[0], firsts[r], seconds[r], now[3 * r + 2], HALF),)

        is_done = step == steps - 1
        if is_done:
            tile, split = unit // SPLITS, unit % SPLITS
            scale = gl.load(factor)
            for r in gl.static_range(STRIPS):
                answer = sum_warps(totals[r], WN, WK) * scale
                row, there = rows_of((tile * STRIPS + r) * WN * 16, N, WN, WK)
                if SPLITS == 1:
                    gl.store(y + row, answer.to(y.dtype.element_ty), mask=there)
                else:
                    gl.store(partials + split * N + row, answer, mask=there)
            if SPLITS > 1:
                thread_barrier()
                arrived = gl.atomic_add(semaphores + tile, 1, sem="acq_rel", scope="gpu")
                if arrived == SPLITS - 1:
                    # Whoever comes last adds all parts up in their order: the bits do not depend on who.
                    for r in gl.static_range(STRIPS):
                        row, there = rows_of((tile * STRIPS + r) * WN * 16, N, WN, WK)
                        answer = gl.load(partials + row, mask=there, cache_modifier=".cg")
                        for part in gl.static_range(1, SPLITS):
                            answer += gl.load(partials + part * N + row, mask=there, cache_modifier=".cg")
                        gl.store(y + row, answer.to(y.dtype.element_ty), mask=there)
                    gl.store(semaphores + tile, 0)
            totals = copies_of(zero, STRIPS)
        step = gl.where(is_done, 0, step + 1)
        unit = gl.where(is_done, unit + programs, unit)
    table._keep_alive()


@dataclass(frozen=True)
class Tile:
    """How a launch is divided among CTAs and warps.

    strips          of 16 rows of the weight, of each warp
    warps_n, warps_k, ctas_per_sm
    ahead           super-blocks that are on their way while one is multiplied
    """

    strips: int
    warps_n: int
    warps_k: int
    ctas_per_sm: int
    ahead: int = 1

    @property
    def rows(self) -> int:
        """Return the number of the weight's rows in a CTA's tile."""
        return STRIP * self.strips * self.warps_n

    def splits(self, n: int, k: int) -> int:
        """Return the CTAs that share a tile along K: as many as run at once and have work for every warp."""
        tiles = triton.cdiv(n, self.rows)
        room = min(NUM_SMS * self.ctas_per_sm // tiles, k // SUPER_BLOCK // self.warps_k, MAX_SPLITS)
        return 1 << max(0, room.bit_length() - 1)

    def constants(self, splits: int, half: bool) -> dict[str, object]:
        return {
            "STRIPS": self.strips, "WN": self.warps_n, "WK": self.warps_k, "SPLITS": splits,
            "AHEAD": self.ahead, "HALF": half,
        }  # fmt: skip

    def options(self) -> dict[str, object]:
        warps = self.warps_n * self.warps_k
        registers = min(255, 65536 // (warps * 32 * self.ctas_per_sm) // 8 * 8)
        return {"num_warps": warps, "maxnreg": registers, "launch_pdl": True}


def launch(x: Tensor, weight: PackedOperand, y: Tensor, tile: Tile) -> None:
    """Write x [1, K] @ w.T into y [1, N]."""
    k, n = x.shape[1], y.shape[1]
    splits = tile.splits(n, k)
    units = triton.cdiv(n, tile.rows) * splits
    partials = torch.empty(splits * n if splits > 1 else 1, dtype=torch.float32, device=x.device)
    iq2_xxs_one_row_kernel[(min(units, NUM_SMS * tile.ctas_per_sm),)](
        x, weight.words, weight.scales, weight.factor, weight.table, y, partials, weight.semaphores,
        n, k, units, **tile.constants(splits, x.dtype is torch.float16), **tile.options(),
    )  # fmt: skip
