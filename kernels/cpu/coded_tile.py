"""The inner loops of a product by coded weights on a CPU, as LLVM code: a few rows of x by a block of 64
weight rows.

Lanes of a vector are rows of the weight, so no sum is added up across lanes. The formula, with s the group's
scale, v the code's value (`VALUES`), z the group's 8 - zero point and f the weight's factor, is

    y[m, n] = f · Σ over groups of  s · (Σ x · v  +  z · Σ x)

Products of x by v are exact if x is bfloat16: neither weights nor activations are rounded. Σ x of a group
is computed outside, once for all n. Each weight vector is decoded once for the rows of x that are in
registers, up to four. With more than PANEL_FROM rows, groups are decoded into a panel in the first cache,
and the panel is multiplied by four rows after another: decoding four-bit codes hides behind the products, but
decoding INT8 does not.

    BF16      AVX-512 with BF16: 32 four-bit codes become a vector of bfloat16 pairs by one shift and one
              vpermw, multiplied by vdpbf16ps. INT8 codes become floats, and pairs of those bfloat16
    AVX512    16 four-bit codes become floats by one shift and one vpermps, multiplied by vfmadd
    AMX       as BF16, but from three rows of x on, up to sixteen at once are multiplied by a panel in tiles
              (`amx.py`)
    PORTABLE  any CPU: shifts, selections and conversions. Run on x86 only; on ARM compiled code has never
              been run

The codes of a block are read in the order of their addresses, and prefetched AHEAD bytes before they are
needed (4096x4096, M=4, one core of an EPYC: 320 µs instead of 640, measured 2026-11-27). The order of a sum
depends on K and the group size alone, so a row's bits do not depend on the rows beside it.
"""

import enum
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import vectors as v
from .code_packing import SHIFTS, TILES, VALUES, Codes, Scales
from .vectors import BYTES, FLOAT, FLOATS, HALVES, INT, INTS, SHORTS, intrinsic, long

AHEAD = 4096


class Instructions(enum.IntEnum):
    BF16 = 0
    AVX512 = 1
    PORTABLE = 2
    AMX = 3


SUMS = {Instructions.BF16: 16, Instructions.AVX512: 16, Instructions.PORTABLE: 4, Instructions.AMX: 16}
"""Vectors of sums that stand in registers: AVX2 has 16 registers of half a vector, NEON 32 of a quarter."""
SUMS_BESIDE_TOTALS = 8
"""Of groups of 16 columns in a panel, whose totals stand in registers too."""
PANEL_FROM = {Codes.INT8: 4, Codes.E2M1: 16}
"""Rows up to which codes are decoded again for every four rows; others always are."""


class Kind(NamedTuple):
    """Of a compiled kernel."""

    instructions: Instructions
    codes: Codes
    scales: Scales

    @property
    def pairs(self) -> bool:
        """Whether two columns of bfloat16 are multiplied at once."""
        return self.instructions in (Instructions.BF16, Instructions.AMX)

    @property
    def steps(self) -> int:
        """Vectors of weights that are decoded from one vector of codes."""
        return self.codes.columns // (2 if self.pairs else 1)

    @property
    def number_bytes(self) -> int:
        """Of a number of x or y."""
        return 2 if self.pairs else 4

    @property
    def scale_bytes(self) -> int:
        return self.scales.vectors * BYTES

    def tiles_at_once(self, rows: int, in_panel: int) -> int:
        sums = SUMS[self.instructions]
        if in_panel and self.scales is Scales.PAIRS:
            sums = min(sums, SUMS_BESIDE_TOTALS)
        return min(TILES, sums // rows)

    def total_place(self, m: int, tile: int, rows: int, in_panel: int) -> int:
        """Bytes from the first total of `rows` rows to that of row m and a tile."""
        tiles = self.tiles_at_once(rows, in_panel)
        return ((tile // tiles * rows + m) * tiles + tile % tiles) * BYTES


def of_literals(kinds: Any) -> list[int] | None:
    """Return the numbers, if all are known while compiling."""
    known = all(isinstance(kind, types.IntegerLiteral) for kind in kinds)
    return [kind.literal_value for kind in kinds] if known else None


def kind_of(instructions: int, codes: int, scales: int) -> Kind:
    return Kind(Instructions(instructions), Codes(codes), Scales(scales))


@intrinsic
def multiply(
    typing: Any, x: Any, x_row: Any, count: Any, codes: Any, scales: Any, group_sums: Any, sums_row: Any,
    totals: Any, group: Any, end: Any, words: Any, all_words: Any,
    instructions: Any, form_of_codes: Any, form_of_scales: Any, rows: Any, in_panel: Any,
) -> Any:  # fmt: skip
    """Add to `totals` the products of `rows` rows of x by groups `group` to `end` of a block.

    x, codes, scales, group_sums: addresses of row 0, column 0; x_row, sums_row: bytes from row to row
    count:    rows that there are: further ones are computed from the last one
    totals:   address of rows * TILES vectors, in the order of `Kind.tiles_at_once`
    words:    vectors of codes of a group in a row of the weight; all_words: of all groups
    in_panel: whether `codes` is a panel of decoded weights of the first of these groups
    """
    literals = (instructions, form_of_codes, form_of_scales, rows, in_panel)
    constants = of_literals(literals)
    if constants is None:
        return None

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        kind, (rows, in_panel) = kind_of(*constants[:3]), constants[3:]
        tiles = kind.tiles_at_once(rows, in_panel)
        with cgutils.for_range(builder, long(TILES // tiles)) as loop:
            moved = list(arguments[:12])
            for index, size in ((3, tiles * BYTES), (4, tiles * kind.scale_bytes), (7, rows * tiles * BYTES)):
                moved[index] = v.plus(builder, moved[index], builder.mul(loop.index, long(size)))
            _Tile(builder, moved, kind, rows, tiles, in_panel).emit()
        return context.get_dummy_value()

    return types.none(*[types.int64] * 12, *literals), code


@intrinsic
def decode(
    typing: Any, codes: Any, words: Any, panel: Any,
    instructions: Any, form_of_codes: Any, form_of_scales: Any,
) -> Any:  # fmt: skip
    """Decode `words` vectors of codes of each tile at address `codes` into a panel."""
    literals = (instructions, form_of_codes, form_of_scales)
    constants = of_literals(literals)
    if constants is None:
        return None

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        codes, words, panel = arguments[:3]
        weights = _Codes(builder, kind_of(*constants), codes, TILES)
        steps = weights.kind.steps
        with cgutils.for_range(builder, words) as loop:
            beside = v.plus(builder, panel, builder.mul(loop.index, long(steps * TILES * BYTES)))
            word = weights.at(loop.index)
            for step in range(steps):
                for tile, vector in enumerate(weights.decoded(word, step)):
                    v.store(builder, v.plus(builder, beside, (step * TILES + tile) * BYTES), vector)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3, *literals), code


@intrinsic
def decode_scaled(
    typing: Any, codes: Any, words: Any, pairs: Any, pair_bytes: Any, half_bytes: Any, scales: Any,
    group: Any, factor: Any, instructions: Any, form_of_codes: Any, form_of_scales: Any,
) -> Any:  # fmt: skip
    """Decode `words` vectors of codes of each tile at address `codes`, all of one group, into pairs of
    bfloat16 with their scales, rounded once.

    pair_bytes: from a pair of columns to the next; half_bytes: from the first two tiles to the other two
    scales: address of group 0, of the block; factor: address of the weight's
    """
    literals = (instructions, form_of_codes, form_of_scales)
    constants = of_literals(literals)
    if constants is None:
        return None

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        codes, words, pairs, pair_bytes, half_bytes, scales, group, factor = arguments[:8]
        kind = kind_of(*constants)
        weights = _Codes(builder, kind, codes, TILES)
        of_all = v.broadcast(builder, FLOATS, v.load(builder, factor, FLOAT))
        place, second_half = scales_of_group(builder, kind, scales, group)
        of_tiles = []
        for tile in range(TILES):
            address = v.plus(builder, place, tile * kind.scale_bytes)
            scale, zero = scale_at(builder, kind.scales, address, second_half)
            of_tiles.append((builder.fmul(scale, of_all), zero))
        with cgutils.for_range(builder, words) as loop:
            of_word = builder.mul(loop.index, builder.mul(pair_bytes, long(kind.steps)))
            word = weights.at(loop.index)
            for step in range(kind.steps):
                first = v.plus(builder, pairs, builder.add(of_word, builder.mul(pair_bytes, long(step))))
                halves = (first, v.plus(builder, first, half_bytes))
                for tile, vector in enumerate(weights.decoded(word, step)):
                    scaled = _scaled_pairs(builder, vector, *of_tiles[tile])
                    v.store(builder, v.plus(builder, halves[tile // 2], tile % 2 * BYTES), scaled)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 8, *literals), code


def _scaled_pairs(builder: ir.IRBuilder, pairs: ir.Value, scale: ir.Value, zero: ir.Value | None) -> ir.Value:
    first = builder.bitcast(builder.shl(pairs, v.constant(INTS, 16)), FLOATS)
    second = builder.bitcast(builder.and_(pairs, v.constant(INTS, 0xFFFF0000)), FLOATS)
    if zero is not None:
        first, second = builder.fadd(first, zero), builder.fadd(second, zero)
    first, second = builder.fmul(first, scale), builder.fmul(second, scale)
    beside = v.call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", SHORTS, second, first)
    in_turn = ir.Constant(SHORTS, [lane // 2 + lane % 2 * 16 for lane in range(32)])
    return v.call(builder, "llvm.x86.avx512.permvar.hi.512", SHORTS, beside, in_turn)


@intrinsic
def clear(typing: Any, address: Any, vectors: Any) -> Any:
    """Set that many vectors at an address to 0."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        with cgutils.for_range(builder, arguments[1]) as loop:
            place = v.plus(builder, arguments[0], builder.mul(loop.index, long(BYTES)))
            v.store(builder, place, v.constant(FLOATS, 0.0))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), code


@intrinsic
def store_rows(
    typing: Any, totals: Any, factor: Any, y: Any, y_row: Any, count: Any,
    instructions: Any, form_of_codes: Any, form_of_scales: Any, rows: Any, in_panel: Any,
) -> Any:  # fmt: skip
    """Multiply the totals of `multiply` by the float32 at address `factor`, and store `count` rows of them at
    y.
    """
    literals = (instructions, form_of_codes, form_of_scales, rows, in_panel)
    constants = of_literals(literals)
    if constants is None:
        return None

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        totals, factor, y, y_row, count = arguments[:5]
        kind, (rows, in_panel) = kind_of(*constants[:3]), constants[3:]
        of_tile = 16 * kind.number_bytes
        of_all = v.broadcast(builder, FLOATS, v.load(builder, factor, FLOAT))
        for m in range(rows):
            with builder.if_then(builder.icmp_signed("<", long(m), count)):
                row = v.plus(builder, y, builder.mul(long(m), y_row))
                for tile in range(TILES):
                    place = kind.total_place(m, tile, rows, in_panel)
                    total = v.load(builder, v.plus(builder, totals, place), FLOATS)
                    total = builder.fmul(total, of_all)
                    total = v.to_bfloat16(builder, total) if kind.pairs else total
                    v.store(builder, v.plus(builder, row, tile * of_tile), total)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5, *literals), code


class _Codes:
    """Emit the code that reads and decodes vectors of codes of `tiles` tiles."""

    def __init__(self, builder: ir.IRBuilder, kind: Kind, address: ir.Value, tiles: int):
        self.builder, self.kind, self.address, self.tiles = builder, kind, address, range(tiles)
        values = VALUES.get(kind.codes, ())
        self.floats = ir.Constant(FLOATS, list(values)) if values else None
        # Twice, since vpermw looks at five bits, of which the highest belongs to the next code.
        halves = [int(np.float32(value).view(np.uint32)) >> 16 for value in values * 2]
        self.halves = ir.Constant(SHORTS, halves) if values else None
        self.magnitudes = values[:8]

    def at(self, word: ir.Value) -> list[Any]:
        """Read the vector of codes numbered `word` of each tile."""
        builder = self.builder
        address = v.plus(builder, self.address, builder.mul(word, long(TILES * BYTES)))
        for tile in self.tiles:
            v.prefetch(builder, v.plus(builder, address, AHEAD + tile * BYTES))
        return [v.plus(builder, address, tile * BYTES) for tile in self.tiles]

    def decoded(self, addresses: list[ir.Value], step: int) -> list[ir.Value]:
        """Return each tile's column `step` as floats, or columns 2 * step and 2 * step + 1 as pairs of
        bfloat16.
        """
        decode = self._of_bytes if self.kind.codes is Codes.INT8 else self._of_nibbles
        return [decode(address, step) for address in addresses]

    def _of_nibbles(self, address: ir.Value, step: int) -> ir.Value:
        builder = self.builder
        lanes = v.load(builder, address, INTS)
        if self.kind.pairs:
            halves = builder.bitcast(lanes, SHORTS)
            halves = builder.lshr(halves, v.constant(SHORTS, 4 * step))
            name = "llvm.x86.avx512.permvar.hi.512"
            return builder.bitcast(v.call(builder, name, SHORTS, self.halves, halves), INTS)
        if self.kind.instructions is Instructions.AVX512:
            lanes = builder.lshr(lanes, v.constant(INTS, SHIFTS[step]))
            return v.call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, self.floats, lanes)
        if self.kind.codes is Codes.INT4:
            lanes = builder.shl(lanes, v.constant(INTS, 28 - SHIFTS[step]))
            return builder.sitofp(builder.ashr(lanes, v.constant(INTS, 28)), FLOATS)
        return self._selected(builder.lshr(lanes, v.constant(INTS, SHIFTS[step])))

    def _selected(self, lanes: ir.Value) -> ir.Value:
        """Return the values of the codes in the lowest four bits: eight magnitudes and a sign."""
        builder, zero = self.builder, v.constant(INTS, 0)
        chosen = [v.constant(FLOATS, value) for value in self.magnitudes]
        for bit in range(3):
            is_set = builder.icmp_unsigned("!=", builder.and_(lanes, v.constant(INTS, 1 << bit)), zero)
            chosen = [
                builder.select(is_set, odd, even) for even, odd in zip(chosen[::2], chosen[1::2], strict=True)
            ]
        sign = builder.shl(builder.and_(lanes, v.constant(INTS, 8)), v.constant(INTS, 28))
        return builder.bitcast(builder.or_(builder.bitcast(chosen[0], INTS), sign), FLOATS)

    def _of_bytes(self, address: ir.Value, step: int) -> ir.Value:
        """With pairs, step 0 is columns 0 and 1, which are 32 bytes; otherwise two steps share those."""
        builder = self.builder
        if self.kind.pairs:
            first = v.plus(builder, address, step * BYTES // 2)
            parts = [self._floats_of_bytes(v.plus(builder, first, BYTES // 4 * half)) for half in range(2)]
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            return builder.bitcast(v.call(builder, name, SHORTS, parts[1], parts[0]), INTS)
        both = v.load(builder, v.plus(builder, address, step // 2 * BYTES // 2), HALVES)
        lanes = builder.shl(builder.zext(both, INTS), v.constant(INTS, 16 if step % 2 else 24))
        return builder.sitofp(builder.ashr(lanes, v.constant(INTS, 24)), FLOATS)

    def _floats_of_bytes(self, address: ir.Value) -> ir.Value:
        return self.builder.sitofp(
            self.builder.sext(v.load(self.builder, address, v.SIXTEEN_BYTES), INTS), FLOATS
        )


class _Tile:
    """Emit the code of one call of `multiply`."""

    def __init__(
        self, builder: ir.IRBuilder, arguments: Any, kind: Kind, rows: int, tiles: int, in_panel: int
    ):
        self.builder, self.kind, self.in_panel = builder, kind, bool(in_panel)
        self.rows, self.tiles = range(rows), range(tiles)
        x, x_row, count, self.codes, self.scales, sums, sums_row = arguments[:7]
        self.totals, self.group, self.end, self.words, self.all_words = arguments[7:]
        self.weights = _Codes(builder, kind, self.codes, tiles)
        last = builder.sub(count, long(1))
        held = [builder.select(builder.icmp_signed("<", long(m), last), long(m), last) for m in self.rows]
        self.x = [v.plus(builder, x, builder.mul(m, x_row)) for m in held]
        self.group_sums = [v.plus(builder, sums, builder.mul(m, sums_row)) for m in held]
        self.sums = [[cgutils.alloca_once(builder, FLOATS) for _ in self.tiles] for _ in self.rows]
        self.held_totals = [[cgutils.alloca_once(builder, FLOATS) for _ in self.tiles] for _ in self.rows]

    def emit(self) -> None:
        builder, zero = self.builder, v.constant(FLOATS, 0.0)
        for m in self.rows:
            for tile in self.tiles:
                builder.store(v.load(builder, self._total(m, tile), FLOATS), self.held_totals[m][tile])
        with cgutils.for_range(builder, builder.sub(self.end, self.group)) as groups:
            group = builder.add(self.group, groups.index)
            for m in self.rows:
                for tile in self.tiles:
                    builder.store(zero, self.sums[m][tile])
            first = builder.mul(group, self.words)
            left = builder.sub(self.all_words, first)
            words = builder.select(builder.icmp_signed("<", left, self.words), left, self.words)
            with cgutils.for_range(builder, words) as loop:
                word = builder.add(first, loop.index)
                self._multiply_word(word)
            self._scale_group(group)
        for m in self.rows:
            for tile in self.tiles:
                v.store(builder, self._total(m, tile), builder.load(self.held_totals[m][tile]))

    def _total(self, m: int, tile: int) -> ir.Value:
        return v.plus(self.builder, self.totals, (m * len(self.tiles) + tile) * BYTES)

    def _multiply_word(self, word: ir.Value) -> None:
        """Emit code for the columns of one vector of codes: add their products to the sums."""
        builder, kind = self.builder, self.kind
        beside = builder.mul(word, long(kind.codes.columns * kind.number_bytes))
        x = [v.plus(builder, row, beside) for row in self.x]
        panel, codes = None, []
        if self.in_panel:
            place = builder.sub(word, builder.mul(self.group, self.words))
            panel = v.plus(builder, self.codes, builder.mul(place, long(kind.steps * TILES * BYTES)))
        else:
            codes = self.weights.at(word)
        for step in range(kind.steps):
            if panel is not None:
                at = [v.plus(builder, panel, (step * TILES + tile) * BYTES) for tile in self.tiles]
                weights = [v.load(builder, each, INTS if kind.pairs else FLOATS) for each in at]
            else:
                weights = self.weights.decoded(codes, step)
            for m in self.rows:
                number = v.load(builder, v.plus(builder, x[m], 4 * step), INT if kind.pairs else FLOAT)
                factor = v.broadcast(builder, INTS if kind.pairs else FLOATS, number)
                for tile, weight in enumerate(weights):
                    sums = self.sums[m][tile]
                    builder.store(self._multiplied(factor, weight, builder.load(sums)), sums)

    def _multiplied(self, x: ir.Value, weight: ir.Value, to: ir.Value) -> ir.Value:
        if self.kind.pairs:
            return v.call(self.builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, to, x, weight)
        return v.fma(self.builder, x, weight, to)

    def _scale_group(self, group: ir.Value) -> None:
        """Emit code that adds a group's sums, times its scales, to the totals."""
        builder, kind = self.builder, self.kind
        scales, second_half = scales_of_group(builder, kind, self.scales, group)
        of_row = builder.mul(group, long(4))
        x_sums = []
        if kind.scales.has_zero:
            numbers = [v.load(builder, v.plus(builder, row, of_row), FLOAT) for row in self.group_sums]
            x_sums = [v.broadcast(builder, FLOATS, number) for number in numbers]
        for tile in self.tiles:
            place = v.plus(builder, scales, tile * kind.scale_bytes)
            scale, zero = scale_at(builder, kind.scales, place, second_half)
            for m in self.rows:
                found = builder.load(self.sums[m][tile])
                found = v.fma(builder, zero, x_sums[m], found) if zero is not None else found
                held = self.held_totals[m][tile]
                builder.store(v.fma(builder, scale, found, builder.load(held)), held)


def scale_at(
    builder: ir.IRBuilder, form: Scales, address: ir.Value, second_half: ir.Value
) -> tuple[ir.Value, ir.Value | None]:
    """Return a group's scale, and its zero if it has one. second_half: 16 of the second group of a pair,
    otherwise 0
    """
    if form is Scales.FLOAT32:
        return v.load(builder, address, FLOATS), None
    if form is Scales.WITH_FLOAT32_ZERO:
        return v.load(builder, address, FLOATS), v.load(builder, v.plus(builder, address, BYTES), FLOATS)
    both = v.load(builder, address, INTS)
    if form is Scales.PAIRS:
        both = builder.shl(both, v.broadcast(builder, INTS, second_half))
    scale = builder.bitcast(builder.and_(both, v.constant(INTS, 0xFFFF0000)), FLOATS)
    zero = builder.bitcast(builder.shl(both, v.constant(INTS, 16)), FLOATS)
    return scale, None if form is Scales.PAIRS else zero


def scales_of_group(
    builder: ir.IRBuilder, kind: Kind, scales: ir.Value, group: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the address of a group's scales, from `scales` of a block, and `second_half` for `scale_at`."""
    place = builder.ashr(group, long(1)) if kind.scales is Scales.PAIRS else group
    second_half = builder.shl(builder.trunc(builder.and_(group, long(1)), INT), ir.Constant(INT, 4))
    return v.plus(builder, scales, builder.mul(place, long(TILES * kind.scale_bytes))), second_half


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
