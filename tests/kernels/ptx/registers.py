"""Registers of all lanes of a PTX program, and operands as instructions name them; not a test by itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Step = Callable[[], None]

WARP = 32
SHARED_START = 1024
"""Of the kernel's own shared memory."""
NUMBER_TYPES = {"u": "uint", "s": "int", "b": "uint", "f": "float"}


class UnknownInstructionError(Exception):
    """PTX that is not emulated; its line."""


def dtype_of(kind: str) -> np.dtype[Any]:
    """Of a PTX type such as `s32`."""
    if kind == "pred":
        return np.dtype(np.bool_)
    return np.dtype(NUMBER_TYPES[kind[0]] + kind[1:])


class Registers:
    """What the instructions of a program have in common; each class of them makes steps out of lines.

    A line's `parts` are what dots part in its name. What they say that is not emulated raises ValueError.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._lane = np.arange(lanes)
        self._registers: dict[str, Array] = {}
        self._special: dict[str, Array] = {}

    def _to(self, name: str, kind: str) -> Array:
        """A register to be written, seen as a type of its own width."""
        register = self._registers[name]
        if kind == "f16x2":
            return register.view(np.uint32).view(np.float16)
        return register.view(self._seen(register, kind))

    @staticmethod
    def _seen(register: Array, kind: str) -> np.dtype[Any]:
        dtype = dtype_of(kind)
        if register.dtype.itemsize != dtype.itemsize:
            raise ValueError(f"{register.dtype} as {kind}")
        return dtype

    def _of(self, text: str, kind: str) -> Array:
        """A register, seen as `kind`, or a number in all lanes."""
        if kind == "f16x2":
            return self._of(text, "b32").view(np.float16)
        if text in self._registers:
            return self._to(text, kind)
        if text in self._special:
            return self._special[text].view(dtype_of(kind))
        if text == "global_smem":
            return np.full(self._lanes, SHARED_START, dtype_of(kind))
        return np.full(self._lanes, self._number(text, kind), dtype_of(kind))

    @staticmethod
    def _number(text: str, kind: str) -> Any:
        if text[:2] in ("0f", "0d"):
            bits = int(text[2:], 16)
            number = np.array(bits, np.uint32 if text[1] == "f" else np.uint64)
            dtype = dtype_of(kind)
            if dtype.kind == "f":
                return number.view(np.float32 if text[1] == "f" else np.float64)
            return number
        number = int(text.rstrip("U"), 0)
        dtype = dtype_of(kind)
        if kind == "pred":
            return number != 0
        bits = number & ((1 << 8 * dtype.itemsize) - 1)
        return np.array(bits, f"u{dtype.itemsize}").view(dtype)

    def _address(self, text: str, kind: str) -> Callable[[], Array]:
        first, _, offset = text.strip("[] ").partition("+")
        base = self._of(first.strip(), kind)
        by = np.array(int(offset.strip() or 0), np.int64).astype(base.dtype)
        return lambda: base + by

    def _several(self, text: str, kind: str) -> list[Array]:
        names = [name.strip() for name in text.strip("{} ").split(",")]
        return [self._of(name, kind) for name in names]

    @staticmethod
    def _allow(parts: list[str], allowed: str) -> None:
        """Modifiers that are known, besides types."""
        unknown = set(parts[1:-1]) - set(allowed.split())
        if unknown:
            raise ValueError(str(unknown))

    def _plain(self, kind: str, operands: list[str], operation: Callable[..., Array]) -> Step:
        to, values = self._to(operands[0], kind), [self._of(operand, kind) for operand in operands[1:]]

        def step() -> None:
            to[:] = operation(*values)

        return step
