"""LLVM code for vectors of sixteen numbers at addresses in memory, for numba's intrinsics of CPU products.

Addresses are 64-bit integers, so that Python hands a kernel numbers alone: handing over a tensor's address
costs a tenth of a microsecond, handing over an array a whole microsecond. LLVM maps a vector to the CPU's
registers: one with AVX-512, two with AVX2, four with NEON. KVarN's kernels, which work on arrays, use
`attention/kvarn/cpu/lanes.py` instead.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

LONG, INT, SHORT, BYTE, FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.FloatType()
INTS, FLOATS = ir.VectorType(INT, 16), ir.VectorType(FLOAT, 16)
SHORTS, HALVES = ir.VectorType(SHORT, 32), ir.VectorType(SHORT, 16)
SIXTEEN_BYTES = ir.VectorType(BYTE, 16)
BYTES = 64
"""Of a vector of floats."""


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate like numba's `intrinsic`, with types: callers do not pass the first parameter, and each
    constant is a type.
    """
    return extending.intrinsic(prefer_literal=True)(function)


def long(value: int) -> ir.Constant:
    return ir.Constant(LONG, value)


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def broadcast(builder: ir.IRBuilder, kind: ir.VectorType, number: ir.Value) -> ir.Value:
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, nothing, constant(ir.VectorType(INT, kind.count), 0))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def plus(builder: ir.IRBuilder, address: ir.Value, offset: ir.Value | int) -> ir.Value:
    return builder.add(address, long(offset) if isinstance(offset, int) else offset)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=_alignment(kind))


def store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    pointer = builder.inttoptr(address, value.type.as_pointer())
    builder.store(value, pointer, align=_alignment(value.type))


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for a cache line that is going to be read; any address is allowed."""
    to_read, every_cache, data = (ir.Constant(INT, value) for value in (0, 3, 1))
    pointer = builder.inttoptr(address, BYTE.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, to_read, every_cache, data)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call(builder, "llvm.fmuladd.v16f32", FLOATS, a, b, c)


def of_bfloat16(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), constant(INTS, 16)), FLOATS)


def to_bfloat16(builder: ir.IRBuilder, floats: ir.Value) -> ir.Value:
    """Round fp32 to bfloat16, to nearest, ties to even. NaN stays NaN."""
    bits = builder.bitcast(floats, INTS)
    odd = builder.and_(builder.lshr(bits, constant(INTS, 16)), constant(INTS, 1))
    rounded = builder.add(bits, builder.add(odd, constant(INTS, 0x7FFF)))
    no_number = builder.fcmp_unordered("uno", floats, floats)
    rounded = builder.select(no_number, constant(INTS, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, constant(INTS, 16)), HALVES)


def _alignment(kind: ir.Type) -> int:
    """Return the alignment that LLVM may assume: that of a single number, since vectors may begin at any
    number.
    """
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return 4 if isinstance(element, ir.FloatType) else int(element.width) // 8


@intrinsic
def number_at(typing: Any, address: Any, index: Any) -> Any:
    """Return the int64 numbered `index` at `address`."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return load(builder, plus(builder, arguments[0], builder.mul(arguments[1], long(8))), LONG)

    return types.int64(types.int64, types.int64), code


@intrinsic
def real_at(typing: Any, address: Any, index: Any) -> Any:
    """Return the float64 numbered `index` at `address`."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits = load(builder, plus(builder, arguments[0], builder.mul(arguments[1], long(8))), LONG)
        return builder.bitcast(bits, ir.DoubleType())

    return types.float64(types.int64, types.int64), code


@intrinsic
def pointer(typing: Any, address: Any, kind: Any) -> Any:
    """Return an address as a pointer to numbers of the type of `kind`, for `numba.carray`."""
    result = types.CPointer(kind)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result(types.int64, kind), code


@intrinsic
def take_number(typing: Any, address: Any) -> Any:
    """Return the int64 at `address`, and increase it by one atomically for the next caller on any thread."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.atomic_rmw(
            "add", builder.inttoptr(arguments[0], LONG.as_pointer()), long(1), "monotonic"
        )

    return types.int64(types.int64), code


@intrinsic
def room(typing: Any, vectors: Any) -> Any:
    """Return the address of that many vectors on the calling function's stack."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.ptrtoint(
            cgutils.alloca_once(builder, ir.ArrayType(FLOATS, vectors.literal_value)), LONG
        )

    return (types.int64(vectors), code) if isinstance(vectors, types.IntegerLiteral) else None


@intrinsic
def run(typing: Any, parallel: Any, threads: Any, function: Any, data: Any) -> Any:
    """Run function(data) on that many threads; on the calling thread if `parallel`, GOMP_parallel's address,
    is 0.
    """

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        parallel, threads, function, data = arguments
        with builder.if_else(builder.icmp_signed("==", parallel, long(0))) as (alone, together):
            with alone:
                kind = ir.FunctionType(ir.VoidType(), [LONG])
                builder.call(builder.inttoptr(function, kind.as_pointer()), [data])
            with together:
                kind = ir.FunctionType(ir.VoidType(), [LONG, LONG, INT, INT])
                count = builder.trunc(threads, INT)
                pointer = builder.inttoptr(parallel, kind.as_pointer())
                builder.call(pointer, [function, data, count, ir.Constant(INT, 0)])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4), code
