"""Sixteen fp32 numbers as one value inside numba's functions, for CPU kernels in explicit vectors.

LLVM maps the lanes to the CPU's registers: one with AVX-512, two with AVX2, four with NEON. Plain loops
depend on LLVM's vectorizer instead, which made some of KVarN's loops ten times as slow. This module is
imported only if a CPU serves KVarN: importing numba takes half a second.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, overload, register_model

WIDTH = 16
FLOAT, SHORT, INT = ir.FloatType(), ir.IntType(16), ir.IntType(32)
FLOATS, SHORTS, INTS = (ir.VectorType(kind, WIDTH) for kind in (FLOAT, SHORT, INT))

FROM_HALF = 2.0**112
"""Between the exponents of fp16 and of fp32."""


class _Lanes(types.Type):
    """The numba type of sixteen lanes: fp32 numbers, or int32 words whose codes are being extracted."""


LANES, WORDS = _Lanes("lanes"), _Lanes("word lanes")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: _Lanes):
        super().__init__(manager, kind, FLOATS if kind == LANES else INTS)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate like numba's `intrinsic`, with types: callers do not pass the first parameter."""
    return extending.intrinsic(function)


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * WIDTH)


def _broadcast(builder: ir.IRBuilder, kind: ir.VectorType, number: ir.Value) -> ir.Value:
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, nothing, _constant(INTS, 0))


def _call(
    builder: ir.IRBuilder, name: str, result: Any, *arguments: ir.Value, reassociated: bool = False
) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments, fastmath=("reassoc",) if reassociated else ())


def _address(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any, kind: ir.VectorType) -> Any:
    """Return the address of element arguments[1] of the flat array arguments[0]."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.bitcast(builder.gep(data, [arguments[1]]), kind.as_pointer())


def _shifted(builder: ir.IRBuilder, bits: ir.Value, by: int) -> ir.Value:
    """Shift to the left, or to the right if `by` is less than 0."""
    return (builder.shl if by > 0 else builder.lshr)(bits, _constant(INTS, abs(by)))


def _rounded(builder: ir.IRBuilder, bits: ir.Value, lost: int) -> ir.Value:
    """Return floats' bits without the lowest `lost` bits, rounded to nearest, ties to even."""
    odd = builder.and_(_shifted(builder, bits, -lost), _constant(INTS, 1))
    return _shifted(builder, builder.add(builder.add(bits, odd), _constant(INTS, (1 << lost - 1) - 1)), -lost)


def _masked(builder: ir.IRBuilder, bits: ir.Value, mask: int) -> ir.Value:
    return builder.and_(bits, _constant(INTS, mask))


def _of_half(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    magnitude = builder.bitcast(_shifted(builder, _masked(builder, bits, 0x7FFF), 13), FLOATS)
    magnitude = builder.bitcast(builder.fmul(magnitude, _constant(FLOATS, FROM_HALF)), INTS)
    sign = _shifted(builder, _masked(builder, bits, 0x8000), 16)
    return builder.bitcast(builder.or_(magnitude, sign), FLOATS)


def _to_half(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    magnitude = builder.bitcast(_masked(builder, bits, 0x7FFFFFFF), FLOATS)
    too_large = _constant(FLOATS, 65536.0)
    magnitude = builder.select(builder.fcmp_ordered("<", magnitude, too_large), magnitude, too_large)
    magnitude = builder.bitcast(builder.fmul(magnitude, _constant(FLOATS, 1 / FROM_HALF)), INTS)
    sign = _masked(builder, _shifted(builder, bits, -16), 0x8000)
    return builder.or_(_rounded(builder, magnitude, 13), sign)


@intrinsic
def load(typing: Any, array: Any, at: Any) -> Any:
    """Load array[at : at + 16]: fp32, bfloat16 as int16 or fp16 as uint16."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if array.dtype == types.float32:
            return builder.load(_address(context, builder, signature, arguments, FLOATS), align=4)
        halves = builder.load(_address(context, builder, signature, arguments, SHORTS), align=2)
        bits = builder.zext(halves, INTS)
        if array.dtype == types.uint16:
            return _of_half(builder, bits)
        return builder.bitcast(_shifted(builder, bits, 16), FLOATS)

    return LANES(array, types.intp), code


@intrinsic
def store(typing: Any, array: Any, at: Any, lanes: Any) -> Any:
    """Store lanes to array[at : at + 16], rounded to nearest if the array has 16 bits."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if array.dtype == types.float32:
            address = _address(context, builder, signature, arguments, FLOATS)
            builder.store(arguments[2], address, align=4)
            return context.get_dummy_value()
        bits = builder.bitcast(arguments[2], INTS)
        bits = _to_half(builder, bits) if array.dtype == types.uint16 else _rounded(builder, bits, 16)
        address = _address(context, builder, signature, arguments, SHORTS)
        builder.store(builder.trunc(bits, SHORTS), address, align=2)
        return context.get_dummy_value()

    return types.none(array, types.intp, LANES), code


@intrinsic
def load_words(typing: Any, array: Any, at: Any) -> Any:
    """Load array[at : at + 16] of int16 words, one word per lane."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        words = builder.load(_address(context, builder, signature, arguments, SHORTS), align=2)
        return builder.zext(words, INTS)

    return WORDS(array, types.intp), code


@intrinsic
def field(typing: Any, words: Any, shift: Any, mask: Any) -> Any:
    """Return (words >> shift) & mask as fp32."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        by, kept = (_broadcast(builder, INTS, builder.trunc(argument, INT)) for argument in arguments[1:])
        return builder.sitofp(builder.and_(builder.lshr(arguments[0], by), kept), FLOATS)

    return LANES(WORDS, types.intp, types.intp), code


@intrinsic
def with_codes(typing: Any, words: Any, codes: Any, shift: Any) -> Any:
    """Return words | codes << shift; codes are whole numbers, and the target bits must be 0."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        words, codes, shift = arguments
        by = _broadcast(builder, INTS, builder.trunc(shift, INT))
        return builder.or_(words, builder.shl(builder.fptosi(codes, INTS), by))

    return WORDS(WORDS, LANES, types.intp), code


@intrinsic
def no_words(typing: Any) -> Any:
    """Word lanes of 0."""
    return WORDS(), lambda context, builder, signature, arguments: _constant(INTS, 0)


@intrinsic
def store_words(typing: Any, array: Any, at: Any, words: Any) -> Any:
    """Store words, int16, to array[at : at + 16]."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        address = _address(context, builder, signature, arguments, SHORTS)
        builder.store(builder.trunc(arguments[2], SHORTS), address, align=2)
        return context.get_dummy_value()

    return types.none(array, types.intp, WORDS), code


@intrinsic
def splat(typing: Any, number: Any) -> Any:
    """Return the number in all lanes."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return _broadcast(builder, FLOATS, arguments[0])

    return LANES(types.float32), code


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once if the CPU can."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return _call(builder, f"llvm.fmuladd.v{WIDTH}f32", FLOATS, *arguments)

    return LANES(LANES, LANES, LANES), code


@intrinsic
def total(typing: Any, lanes: Any) -> Any:
    """Return the sum of all lanes, in an order that is always the same."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        name, zero = f"llvm.vector.reduce.fadd.v{WIDTH}f32", ir.Constant(FLOAT, -0.0)
        return _call(builder, name, FLOAT, zero, *arguments, reassociated=True)

    return types.float32(LANES), code


@intrinsic
def largest(typing: Any, lanes: Any) -> Any:
    """Of all lanes."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return _call(builder, f"llvm.vector.reduce.fmax.v{WIDTH}f32", FLOAT, *arguments)

    return types.float32(LANES), code


@intrinsic
def smallest(typing: Any, lanes: Any) -> Any:
    """Of all lanes."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return _call(builder, f"llvm.vector.reduce.fmin.v{WIDTH}f32", FLOAT, *arguments)

    return types.float32(LANES), code


@intrinsic
def rotated(typing: Any, lanes: Any) -> Any:
    """Multiply the lanes by a Hadamard matrix of ±1: a butterfly for each bit of a lane's index."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        (lanes,) = arguments
        for bit in (1, 2, 4, 8):
            other = ir.Constant(INTS, [index ^ bit for index in range(WIDTH)])
            signs = ir.Constant(FLOATS, [-1.0 if index & bit else 1.0 for index in range(WIDTH)])
            swapped = builder.shuffle_vector(lanes, lanes, other)
            lanes = builder.fadd(swapped, builder.fmul(lanes, signs))
        return lanes

    return LANES(LANES), code


@intrinsic
def exponential(typing: Any, lanes: Any) -> Any:
    """Return e to the power of each lane. A lane below -87 counts as -87; no lane may be above 88. The result
    is computed as in Cephes: 2^n times a polynomial.
    """

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        def times(a: ir.Value, b: ir.Value | float, c: ir.Value | float) -> ir.Value:
            b, c = (_constant(FLOATS, x) if isinstance(x, float) else x for x in (b, c))
            return _call(builder, f"llvm.fmuladd.v{WIDTH}f32", FLOATS, a, b, c)

        least, rounding = _constant(FLOATS, -87.0), _constant(FLOATS, 1.5 * 2**23)
        low = builder.fcmp_ordered("<", arguments[0], least)
        x = builder.select(low, least, arguments[0])
        # Its lowest bits are n.
        shifted = times(x, 1.44269504, 1.5 * 2**23)
        n = builder.fsub(shifted, rounding)
        x = times(n, 2.12194440e-4, times(n, -0.693359375, x))
        y = _constant(FLOATS, 1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            y = times(y, x, factor)
        y = times(builder.fmul(x, x), y, builder.fadd(x, _constant(FLOATS, 1.0)))
        power = builder.shl(builder.bitcast(shifted, INTS), _constant(INTS, 23))
        return builder.bitcast(builder.add(builder.bitcast(y, INTS), power), FLOATS)

    return LANES(LANES), code


def _operation(emit: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value], python: Any) -> None:
    """Make `python`, a function of two numbers, work on lanes too."""

    @intrinsic
    def operation(typing: Any, a: Any, b: Any) -> Any:
        return LANES(LANES, LANES), lambda context, builder, signature, arguments: emit(builder, *arguments)

    def of_lanes(a, b):  # type: ignore[no-untyped-def]
        return operation(a, b)

    @overload(python)
    def of_any(a, b):  # type: ignore[no-untyped-def]
        return of_lanes if (a, b) == (LANES, LANES) else None


_operation(lambda builder, a, b: builder.fadd(a, b), operator.add)
_operation(lambda builder, a, b: builder.fsub(a, b), operator.sub)
_operation(lambda builder, a, b: builder.fmul(a, b), operator.mul)
_operation(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b), max)
_operation(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b), min)


@intrinsic
def bits(typing: Any, number: Any) -> Any:
    """Return an fp32 number's bits, int32."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.bitcast(arguments[0], INT)

    return types.int32(types.float32), code


@intrinsic
def of_bits(typing: Any, number: Any) -> Any:
    """The reverse."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), code
