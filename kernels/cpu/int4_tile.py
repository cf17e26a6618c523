"""The inner loops of the INT4 product on a CPU, as LLVM code: a few rows of x by a block of 64 weight rows.

Lanes of a vector are rows of the weight, so no sum is added up across lanes. The formula, with s the group's
scale and c the code, is

    y[m, n] = Σ over groups of  s · (Σ x · (c - 8)  +  (8 - zero) · Σ x)

Products of x by c - 8 are exact if x is bfloat16: neither weights nor activations are rounded. Σ x of a group
is computed outside, once for all n. Each weight vector is decoded once for the rows of x that are in
registers, up to four, by one shift and one look-up in a register:

    BF16      AVX-512 with BF16: 32 codes become a vector of bfloat16 pairs by vpermw, multiplied by vdpbf16ps
    AVX512    16 codes become floats by vpermps, multiplied by vfmadd
    PORTABLE  any CPU: 16 codes are shifted to the top of their lanes, shifted back and converted. Run on x86
              only; on ARM compiled code has never been run

The codes of a block are read in the order of their addresses, and prefetched AHEAD bytes before they are
needed (4096x4096, M=4, one core of an EPYC: 320 µs instead of 640, measured 2026-11-27). The order of a sum
depends on K and the group size alone, so a row's bits do not depend on the rows beside it.
"""

import enum
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import vectors as v
from .int4_packing import COLUMNS, SHIFTS, TILES
from .vectors import BYTES, FLOAT, FLOATS, HALVES, INT, INTS, SHORTS, intrinsic, long

AHEAD = 4096


class Instructions(enum.IntEnum):
    BF16 = 0
    AVX512 = 1
    PORTABLE = 2


ROWS = (1, 2, 4)
"""Rows of x that stand in registers at once."""
SUMS = {Instructions.BF16: 16, Instructions.AVX512: 16, Instructions.PORTABLE: 4}
"""Vectors of sums that stand in registers: AVX2 has 16 registers of half a vector, NEON 32 of a quarter."""

_VALUES = [index - 16 * (index > 7) for index in range(16)]
FLOAT_TABLE = ir.Constant(FLOATS, [float(value) for value in _VALUES])
BFLOAT16_TABLE = ir.Constant(SHORTS, [int(np.float32(value).view(np.uint32)) >> 16 for value in _VALUES * 2])
"""Twice, since vpermw looks at five bits, of which the highest belongs to the next code."""


def tiles_at_once(instructions: Instructions, rows: int) -> int:
    return min(TILES, SUMS[instructions] // rows)


@intrinsic
def multiply(
    typing: Any, x: Any, x_row: Any, count: Any, codes: Any, scales: Any, group_sums: Any, sums_row: Any,
    y: Any, y_row: Any, groups: Any, words: Any, scratch: Any,
    instructions: Any, rows: Any, tiles: Any, wide: Any,
) -> Any:  # fmt: skip
    """Compute y[m, n] of `rows` rows of x by the first `tiles` tiles of a block.

    x, codes, scales, group_sums, y: addresses; x_row, sums_row, y_row: bytes from row to row
    count:    rows that there are: further ones are computed from the last one and not stored
    words:    of a group in a row
    scratch:  address of rows * tiles vectors
    wide:     whether scales are float32
    """
    constants = (instructions, rows, tiles, wide)
    if not all(isinstance(kind, types.IntegerLiteral) for kind in constants):
        return None

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        sizes = [kind.literal_value for kind in constants]
        _Tile(builder, arguments[:12], Instructions(sizes[0]), *sizes[1:]).emit()
        return context.get_dummy_value()

    return types.none(*[types.int64] * 12, *constants), code


class _Tile:
    """Emit the code of one call of `multiply`."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        arguments: Any,
        instructions: Instructions,
        rows: int,
        tiles: int,
        wide: int,
    ):
        self.builder, self.instructions, self.wide = builder, instructions, bool(wide)
        self.rows, self.tiles = range(rows), range(tiles)
        x, x_row, self.count, self.codes, self.scales, sums, sums_row = arguments[:7]
        self.y, self.y_row, self.groups, self.words, self.scratch = arguments[7:]
        self.pairs = instructions is Instructions.BF16
        self.x_bytes = COLUMNS * (2 if self.pairs else 4)
        """Of x beside one word."""
        last = builder.sub(self.count, long(1))
        held = [builder.select(builder.icmp_signed("<", long(m), last), long(m), last) for m in self.rows]
        self.x = [v.plus(builder, x, builder.mul(m, x_row)) for m in held]
        self.group_sums = [v.plus(builder, sums, builder.mul(m, sums_row)) for m in held]
        self.sums = [[cgutils.alloca_once(builder, FLOATS) for _ in self.tiles] for _ in self.rows]

    def emit(self) -> None:
        builder, zero = self.builder, v.constant(FLOATS, 0.0)
        for m in self.rows:
            for tile in self.tiles:
                v.store(builder, self._total(m, tile), zero)
        with cgutils.for_range(builder, self.groups) as groups:
            for m in self.rows:
                for tile in self.tiles:
                    builder.store(zero, self.sums[m][tile])
            first = builder.mul(groups.index, self.words)
            with cgutils.for_range(builder, self.words) as words:
                self._multiply_word(builder.add(first, words.index))
            self._scale_group(groups.index)
        for m in self.rows:
            with builder.if_then(builder.icmp_signed("<", long(m), self.count)):
                self._store_row(m)

    def _total(self, m: int, tile: int) -> ir.Value:
        return v.plus(self.builder, self.scratch, (m * len(self.tiles) + tile) * BYTES)

    def _multiply_word(self, word: ir.Value) -> None:
        """Emit code for eight columns: decode them and add their products to the sums."""
        builder = self.builder
        codes = v.plus(builder, self.codes, builder.mul(word, long(TILES * BYTES)))
        for tile in self.tiles:
            v.prefetch(builder, v.plus(builder, codes, AHEAD + tile * BYTES))
        packed = [v.load(builder, v.plus(builder, codes, tile * BYTES), INTS) for tile in self.tiles]
        beside = builder.mul(word, long(self.x_bytes))
        x = [v.plus(builder, row, beside) for row in self.x]
        for step in range(COLUMNS // 2 if self.pairs else COLUMNS):
            weights = [self._decoded(lanes, step) for lanes in packed]
            for m in self.rows:
                number = v.load(builder, v.plus(builder, x[m], 4 * step), INT if self.pairs else FLOAT)
                factor = v.broadcast(builder, INTS if self.pairs else FLOATS, number)
                for tile, weight in enumerate(weights):
                    place = self.sums[m][tile]
                    builder.store(self._multiplied(factor, weight, builder.load(place)), place)

    def _decoded(self, lanes: ir.Value, step: int) -> ir.Value:
        """Return column `step` as floats, or columns 2 * step and 2 * step + 1 as pairs of bfloat16."""
        builder = self.builder
        if self.pairs:
            halves = builder.bitcast(lanes, SHORTS)
            halves = builder.lshr(halves, v.constant(SHORTS, 4 * step))
            name = "llvm.x86.avx512.permvar.hi.512"
            return builder.bitcast(v.call(builder, name, SHORTS, BFLOAT16_TABLE, halves), INTS)
        if self.instructions is Instructions.AVX512:
            lanes = builder.lshr(lanes, v.constant(INTS, SHIFTS[step]))
            return v.call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, FLOAT_TABLE, lanes)
        lanes = builder.shl(lanes, v.constant(INTS, 28 - SHIFTS[step]))
        return builder.sitofp(builder.ashr(lanes, v.constant(INTS, 28)), FLOATS)

    def _multiplied(self, x: ir.Value, weight: ir.Value, to: ir.Value) -> ir.Value:
        if self.pairs:
            return v.call(self.builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, to, x, weight)
        return v.fma(self.builder, x, weight, to)

    def _scale_group(self, group: ir.Value) -> None:
        builder, size = self.builder, BYTES * (2 if self.wide else 1)
        scales = v.plus(builder, self.scales, builder.mul(group, long(TILES * size)))
        of_row = builder.mul(group, long(4))
        x_sums = [v.load(builder, v.plus(builder, row, of_row), FLOAT) for row in self.group_sums]
        x_sums = [v.broadcast(builder, FLOATS, number) for number in x_sums]
        for tile in self.tiles:
            scale, zero = self._scale_and_zero(v.plus(builder, scales, tile * size))
            for m in self.rows:
                place = self._total(m, tile)
                shifted = v.fma(builder, zero, x_sums[m], builder.load(self.sums[m][tile]))
                v.store(builder, place, v.fma(builder, scale, shifted, v.load(builder, place, FLOATS)))

    def _scale_and_zero(self, address: ir.Value) -> tuple[ir.Value, ir.Value]:
        builder = self.builder
        if self.wide:
            return v.load(builder, address, FLOATS), v.load(builder, v.plus(builder, address, BYTES), FLOATS)
        both = v.load(builder, address, INTS)
        scale = builder.and_(both, v.constant(INTS, 0xFFFF0000))
        zero = builder.shl(both, v.constant(INTS, 16))
        return builder.bitcast(scale, FLOATS), builder.bitcast(zero, FLOATS)

    def _store_row(self, m: int) -> None:
        builder = self.builder
        row = v.plus(builder, self.y, builder.mul(long(m), self.y_row))
        for tile in self.tiles:
            total = v.load(builder, self._total(m, tile), FLOATS)
            if self.pairs:
                v.store(builder, v.plus(builder, row, tile * BYTES // 2), v.to_bfloat16(builder, total))
            else:
                v.store(builder, v.plus(builder, row, tile * BYTES), total)


@intrinsic
def total(typing: Any, x: Any, count: Any, is_bfloat16: Any) -> Any:
    """Return the sum of `count` numbers at address x, a multiple of 16, in an order that is always the
    same.
    """

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        kind, size = (HALVES, BYTES // 2) if is_bfloat16.literal_value else (FLOATS, BYTES)
        lanes = cgutils.alloca_once_value(builder, v.constant(FLOATS, 0.0))
        with cgutils.for_range(builder, builder.sdiv(arguments[1], long(16))) as loop:
            numbers = v.load(
                builder, v.plus(builder, arguments[0], builder.mul(loop.index, long(size))), kind
            )
            numbers = v.of_bfloat16(builder, numbers) if kind is HALVES else numbers
            builder.store(builder.fadd(builder.load(lanes), numbers), lanes)
        kind_of_sum = ir.FunctionType(FLOAT, [FLOAT, FLOATS])
        name = "llvm.vector.reduce.fadd.v16f32"
        add_up = cgutils.get_or_insert_function(builder.module, kind_of_sum, name)
        return builder.call(add_up, [ir.Constant(FLOAT, -0.0), builder.load(lanes)], fastmath=("reassoc",))

    return types.float32(types.int64, types.int64, is_bfloat16), code
