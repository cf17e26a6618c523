"""AMX's share of a product by coded weights: sixteen rows of x by a group of a decoded panel.

A panel's pairs of columns lie as AMX reads its second operand: a row of a tile is a pair of columns of
sixteen rows of the weight. A band of sixteen rows of x needs no more than the eight tiles:

    tmm0 to tmm3  sums of the four tiles of a block
    tmm4          x
    tmm5 to tmm7  the panel

Products are exact and sums are float32, as in `coded_tile.py`, in another order. Tiles hold nothing between
two calls of a product: oneDNN, which uses them too, loads its own configuration.
"""

import struct
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import vectors as v
from .code_packing import TILES, Codes
from .coded_tile import Instructions, Kind, kind_of, of_literals, scale_at, scales_of_group
from .vectors import BYTE, BYTES, FLOAT, FLOATS, intrinsic, long

BAND = 16
"""Rows of x that are multiplied at once, at most."""
FROM_ROWS = 3
"""Rows from which tiles are faster than vectors: half-empty tiles take no longer than full ones."""
PALETTE, ROWS_AT = 1, 48
X, PANEL = 4, (5, 6, 7)
ROW_OF_TILES = TILES * BYTES


def columns_of_a_tile(codes: Codes) -> int:
    """Columns that one instruction multiplies; groups are multiples of it, and so is K."""
    return 16 if codes is Codes.E2M1 else 32


@intrinsic
def configure(typing: Any, rows: Any, instructions: Any, form_of_codes: Any) -> Any:
    """Give the calling thread's tiles their sizes, for that many rows of x; nothing, unless the instructions
    are AMX.
    """
    literals = (instructions, form_of_codes)
    constants = of_literals(literals)
    if constants is None:
        return None

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if Instructions(constants[0]) is Instructions.AMX:
            columns = columns_of_a_tile(Codes(constants[1]))
            sizes = [(BAND, BYTES)] * TILES + [(BAND, 2 * columns)] + [(columns // 2, BYTES)] * len(PANEL)
            widths, rows = [width for _, width in sizes], [count for count, _ in sizes]
            packed = struct.pack("<BB14x8H16x8B8x", PALETTE, 0, *widths, *rows)
            numbers = ir.Constant(ir.ArrayType(BYTE, len(packed)), bytearray(packed))
            place = cgutils.alloca_once(builder, numbers.type)
            builder.store(numbers, place)
            address = builder.ptrtoint(place, v.LONG)
            for tile in (*range(TILES), X):
                v.store(builder, v.plus(builder, address, ROWS_AT + tile), builder.trunc(arguments[0], BYTE))
            v.call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), builder.inttoptr(address, BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.none(types.int64, *literals), code


@intrinsic
def release(typing: Any, instructions: Any) -> Any:
    """Leave the calling thread's tiles as a thread begins with them."""
    constants = of_literals((instructions,))
    if constants is None:
        return None

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if Instructions(constants[0]) is Instructions.AMX:
            v.call(builder, "llvm.x86.tilerelease", ir.VoidType())
        return context.get_dummy_value()

    return types.none(instructions), code


@intrinsic
def multiply_band(
    typing: Any, x: Any, x_row: Any, count: Any, panel: Any, columns: Any, scales: Any, group_sums: Any,
    sums_row: Any, totals: Any, group: Any, sums: Any,
    instructions: Any, form_of_codes: Any, form_of_scales: Any,
) -> Any:  # fmt: skip
    """Add to `totals` the products of `count` rows of x, of which tiles are, by one group of a panel.

    x, panel:           addresses of the group's first column
    columns:            of the group
    scales, group_sums: addresses of group 0, of the block and of the band's first row
    totals:             address of BAND * TILES vectors, as `coded_tile.multiply` keeps them of four rows
    sums:               address of as many vectors that nobody else needs
    """
    literals = (instructions, form_of_codes, form_of_scales)
    constants = of_literals(literals)
    if constants is None:
        return None

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        kind = kind_of(*constants)
        if kind.instructions is Instructions.AMX:
            x, x_row, count, panel, columns, scales, group_sums, sums_row, totals, group, sums = arguments[
                :11
            ]
            _multiply(builder, kind, x, x_row, panel, columns, sums)
            _scale(builder, kind, count, scales, group_sums, sums_row, totals, group, sums)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 11, *literals), code


def _multiply(
    builder: ir.IRBuilder, kind: Kind, x: ir.Value, x_row: ir.Value, panel: ir.Value, columns: ir.Value,
    sums: ir.Value,
) -> None:  # fmt: skip
    nothing, at_once = ir.VoidType(), columns_of_a_tile(kind.codes)
    for tile in range(TILES):
        v.call(builder, "llvm.x86.tilezero", nothing, _number(tile))
    with cgutils.for_range(builder, builder.udiv(columns, long(at_once))) as loop:
        beside = builder.mul(loop.index, long(2 * at_once))
        _load(builder, X, v.plus(builder, x, beside), x_row)
        below = v.plus(builder, panel, builder.mul(loop.index, long(at_once // 2 * ROW_OF_TILES)))
        for tile in range(TILES):
            weights = PANEL[tile % len(PANEL)]
            _load(builder, weights, v.plus(builder, below, tile * BYTES), long(ROW_OF_TILES))
            v.call(builder, "llvm.x86.tdpbf16ps", nothing, _number(tile), _number(X), _number(weights))
    for tile in range(TILES):
        place = builder.inttoptr(v.plus(builder, sums, tile * BYTES), BYTE.as_pointer())
        v.call(builder, "llvm.x86.tilestored64", nothing, _number(tile), place, long(ROW_OF_TILES))


def _scale(
    builder: ir.IRBuilder, kind: Kind, count: ir.Value, scales: ir.Value, group_sums: ir.Value,
    sums_row: ir.Value, totals: ir.Value, group: ir.Value, sums: ir.Value,
) -> None:  # fmt: skip
    """Emit code that adds a band's sums of a group, times the group's scales, to the totals."""
    place, second_half = scales_of_group(builder, kind, scales, group)
    of_tiles = [
        scale_at(builder, kind.scales, v.plus(builder, place, tile * kind.scale_bytes), second_half)
        for tile in range(TILES)
    ]
    of_group = v.plus(builder, group_sums, builder.mul(group, long(4)))
    last = builder.sub(count, long(1))
    with cgutils.for_range(builder, builder.udiv(builder.add(count, long(3)), long(4))) as quads:
        quad = builder.mul(quads.index, long(4 * ROW_OF_TILES))
        for m in range(4):
            row = builder.add(builder.mul(quads.index, long(4)), long(m))
            x_sum = None
            if kind.scales.has_zero:
                row = builder.select(builder.icmp_signed("<", row, last), row, last)
                number = v.load(builder, v.plus(builder, of_group, builder.mul(row, sums_row)), FLOAT)
                x_sum = v.broadcast(builder, FLOATS, number)
            found_at = v.plus(builder, sums, v.plus(builder, quad, m * ROW_OF_TILES))
            for tile, (scale, zero) in enumerate(of_tiles):
                found = v.load(builder, v.plus(builder, found_at, tile * BYTES), FLOATS)
                found = found if zero is None else v.fma(builder, zero, x_sum, found)
                total = v.plus(builder, totals, v.plus(builder, quad, kind.total_place(m, tile, 4, 1)))
                v.store(builder, total, v.fma(builder, scale, found, v.load(builder, total, FLOATS)))


def _load(builder: ir.IRBuilder, tile: int, address: ir.Value, row_bytes: ir.Value) -> None:
    pointer = builder.inttoptr(address, BYTE.as_pointer())
    v.call(builder, "llvm.x86.tileloadd64", ir.VoidType(), _number(tile), pointer, row_bytes)


def _number(tile: int) -> ir.Constant:
    return ir.Constant(BYTE, tile)
