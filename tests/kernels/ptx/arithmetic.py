"""PTX's arithmetic, logic, choices and conversions, on all lanes at once; not a test by itself.

ex2, lg2 and div are exact but for rounding; fma.f32 is at times rounded twice.
"""

from collections.abc import Callable

import numpy as np
from scalegate.tests.kernels.ptx.registers import Array, Registers, Step, dtype_of

COMPARISONS: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


class Arithmetic(Registers):
    """Instructions by their names, an underscore before each."""

    def _flushed(self, parts: list[str], operands: list[str], operation: Callable[..., Array]) -> Step:
        kind = parts[-1]
        if "ftz" not in parts:
            return self._plain(kind, operands, operation)
        least = np.float32(2.0**-126)

        def flush(x: Array) -> Array:
            return np.where(np.abs(x) < least, np.copysign(np.float32(0), x), x)

        return self._plain(kind, operands, lambda *x: flush(operation(*map(flush, x)).astype(np.float32)))

    def _add(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "rn ftz")
        return self._flushed(parts, operands, np.add)

    def _sub(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "rn ftz")
        return self._flushed(parts, operands, np.subtract)

    def _mul(self, parts: list[str], operands: list[str]) -> Step:
        kind = parts[-1]
        if parts[1] == "wide":
            wide = kind[0] + str(2 * int(kind[1:]))
            to, x, y = self._to(operands[0], wide), self._of(operands[1], kind), self._of(operands[2], kind)
            return lambda: np.copyto(to, x.astype(to.dtype) * y.astype(to.dtype))
        self._allow(parts, "rn ftz" if kind[0] == "f" else "lo")
        return self._flushed(parts, operands, np.multiply)

    def _mad(self, parts: list[str], operands: list[str]) -> Step:
        kind = parts[-1]
        if parts[1] == "wide":
            wide = kind[0] + str(2 * int(kind[1:]))
            to, x, y = self._to(operands[0], wide), self._of(operands[1], kind), self._of(operands[2], kind)
            z = self._of(operands[3], wide)
            return lambda: np.copyto(to, x.astype(to.dtype) * y.astype(to.dtype) + z)
        self._allow(parts, "lo")
        return self._plain(kind, operands, lambda x, y, z: x * y + z)

    def _fma(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "rn ftz")
        double = np.float64
        return self._flushed(
            parts, operands, lambda x, y, z: x.astype(double) * y.astype(double) + z.astype(double)
        )

    def _div(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "full rn approx ftz")
        return self._flushed(parts, operands, np.divide)

    def _neg(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "ftz")
        return self._flushed(parts, operands, np.negative)

    def _abs(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "ftz")
        return self._flushed(parts, operands, np.abs)

    def _max(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "ftz NaN" if parts[-1][0] == "f" else "")
        is_number = parts[-1][0] == "f" and "NaN" not in parts
        return self._flushed(parts, operands, np.fmax if is_number else np.maximum)

    def _min(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "ftz NaN" if parts[-1][0] == "f" else "")
        is_number = parts[-1][0] == "f" and "NaN" not in parts
        return self._flushed(parts, operands, np.fmin if is_number else np.minimum)

    def _ex2(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "approx ftz")
        return self._flushed(parts, operands, np.exp2)

    def _lg2(self, parts: list[str], operands: list[str]) -> Step:
        self._allow(parts, "approx ftz")
        return self._flushed(parts, operands, np.log2)

    def _and(self, parts: list[str], operands: list[str]) -> Step:
        return self._plain(parts[1], operands, np.bitwise_and)

    def _or(self, parts: list[str], operands: list[str]) -> Step:
        return self._plain(parts[1], operands, np.bitwise_or)

    def _xor(self, parts: list[str], operands: list[str]) -> Step:
        return self._plain(parts[1], operands, np.bitwise_xor)

    def _not(self, parts: list[str], operands: list[str]) -> Step:
        return self._plain(parts[1], operands, np.invert)

    def _shl(self, parts: list[str], operands: list[str]) -> Step:
        return self._shifted("u" + parts[1][1:], operands, np.left_shift)

    def _shr(self, parts: list[str], operands: list[str]) -> Step:
        return self._shifted(parts[1], operands, np.right_shift)

    def _shifted(self, kind: str, operands: list[str], operation: Callable[..., Array]) -> Step:
        to, value, by = self._to(operands[0], kind), self._of(operands[1], kind), self._of(operands[2], "u32")
        bits = 8 * to.dtype.itemsize

        def step() -> None:
            # Numpy leaves open what a shift by all bits does.
            near = operation(value, np.minimum(by, bits - 1).astype(to.dtype))
            far = value >> (bits - 1) if to.dtype.kind == "i" else np.zeros_like(value)
            to[:] = np.where(by < bits, near, far)

        return step

    def _bfe(self, parts: list[str], operands: list[str]) -> Step:
        kind = parts[1]
        if dtype_of(kind).itemsize != 4:
            raise ValueError(kind)
        to, value = self._to(operands[0], kind), self._of(operands[1], kind)
        start, length = int(operands[2], 0), int(operands[3], 0)
        if not 0 < length <= 32 - start:
            raise ValueError(operands)
        return lambda: np.copyto(to, value << (32 - start - length) >> (32 - length))

    def _prmt(self, parts: list[str], operands: list[str]) -> Step:
        if parts[1:] != ["b32"]:
            raise ValueError(parts)
        to = self._to(operands[0], "b32").view(np.uint8).reshape(self._lanes, 4)
        a, b, select = (self._of(operand, "b32") for operand in operands[1:])
        nibbles = 4 * np.arange(4, dtype=np.uint32)

        def permute() -> None:
            both = np.concatenate([x.view(np.uint8).reshape(self._lanes, 4) for x in (a, b)], 1)
            chosen = select[:, None] >> nibbles & 15
            found = np.take_along_axis(both, (chosen & 7).astype(np.int64), 1)
            to[:] = np.where(chosen & 8, np.where(found & 0x80, 0xFF, 0), found)

        return permute

    def _lop3(self, parts: list[str], operands: list[str]) -> Step:
        table = int(operands[4], 0)

        def combine(a: Array, b: Array, c: Array) -> Array:
            out = np.zeros_like(a)
            for i in range(8):
                if table >> i & 1:
                    out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            return out

        return self._plain("b32", operands[:4], combine)

    def _setp(self, parts: list[str], operands: list[str]) -> Step:
        if len(parts) != 3 or len(operands) != 3:
            raise ValueError(parts)
        how, kind = parts[1:]
        to, x, y = self._to(operands[0], "pred"), self._of(operands[1], kind), self._of(operands[2], kind)
        if kind[0] == "f" and how[-1] == "u" and how[:-1] in COMPARISONS:
            compare = COMPARISONS[how[:-1]]
            return lambda: np.copyto(to, compare(x, y) | np.isnan(x) | np.isnan(y))
        compare = COMPARISONS[how]
        if kind[0] == "f":
            return lambda: np.copyto(to, compare(x, y) & ~np.isnan(x) & ~np.isnan(y))
        return lambda: np.copyto(to, compare(x, y))

    def _selp(self, parts: list[str], operands: list[str]) -> Step:
        kind = parts[1]
        to, x, y = (self._of(operand, kind) for operand in operands[:3])
        choice = self._of(operands[3], "pred")
        return lambda: np.copyto(to, np.where(choice, x, y))

    def _mov(self, parts: list[str], operands: list[str]) -> Step:
        kind = parts[1]
        if operands[0].startswith("{"):
            narrow = f"b{8 * dtype_of(kind).itemsize // 2}"
            low, high = self._several(operands[0], narrow)
            pairs = self._of(operands[1], "u" + kind[1:]).view(low.dtype).reshape(self._lanes, 2)

            def unpack() -> None:
                low[:], high[:] = pairs[:, 0], pairs[:, 1]

            return unpack
        if operands[1].startswith("{"):
            narrow = f"b{8 * dtype_of(kind).itemsize // 2}"
            halves = self._several(operands[1], narrow)
            joined = self._to(operands[0], kind).view(halves[0].dtype).reshape(self._lanes, 2)

            def pack() -> None:
                joined[:, 0], joined[:, 1] = halves

            return pack
        return self._plain(kind, operands, lambda x: x)

    def _cvt(self, parts: list[str], operands: list[str]) -> Step:
        self._allow([*parts[:-1], ""], f"rn {parts[-2]}")
        target, source = parts[-2:]
        if target in ("bf16x2", "f16x2"):
            if source != "f32" or "rn" not in parts:
                raise ValueError(parts)
            both = self._to(operands[0], "b32").view(np.uint16).reshape(self._lanes, 2)
            high, low = (self._of(operand, "f32") for operand in operands[1:])
            narrow = to_bf16 if target == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)

            def convert_pair() -> None:
                both[:, 0], both[:, 1] = narrow(low), narrow(high)

            return convert_pair
        if target == "bf16" and source == "f32":
            short, wide = self._to(operands[0], "b16"), self._of(operands[1], "f32")
            return lambda: np.copyto(short, to_bf16(wide))
        if source == "bf16" and target == "f32":
            wide, short = self._to(operands[0], "b32"), self._of(operands[1], "b16")
            return lambda: np.copyto(wide, short.astype(np.uint32) << 16)
        if target[0] != "f" and source[0] == "f":
            raise ValueError(parts)
        to, value = self._to(operands[0], target), self._of(operands[1], source)
        return lambda: np.copyto(to, value.astype(to.dtype))


def to_bf16(x: Array) -> Array:
    """fp32 → bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)
