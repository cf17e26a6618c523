"""Global and shared memory of a PTX program, and what loads, stores and copies; not a test by itself.

Fragments of `ldmatrix` and `stmatrix` are those of the PTX ISA's tables. Addresses outside of a buffer and
misaligned ones raise, and so does a warp that meets what another one did to shared memory since the last
barrier; races of one warp's lanes are not seen.
"""

import re
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from scalegate.tests.kernels.ptx.registers import (
    SHARED_START,
    WARP,
    Array,
    Registers,
    Step,
    UnknownInstructionError,
    dtype_of,
)

BASE = 1 << 33
"""Of global memory: no address fits in 32 bits."""
ALIGNED = 256
GUARD = 4096
"""Bytes between buffers, which nothing may touch."""


class RaceError(Exception):
    """A warp meets what another one did to shared memory since the last barrier."""


class Memory:
    """Global memory: buffers in one array of bytes."""

    def __init__(self) -> None:
        self.bytes = np.zeros(0, np.uint8)
        self.inside = np.zeros(0, np.bool_)
        self._places: dict[str, tuple[int, Array]] = {}

    def place(self, name: str, array: Array) -> None:
        """A copy of `array`."""
        start = -(-(len(self.bytes) + GUARD) // ALIGNED) * ALIGNED
        end = start + array.nbytes
        self.bytes = np.concatenate([self.bytes, np.zeros(end + GUARD - len(self.bytes), np.uint8)])
        self.inside = np.concatenate([self.inside, np.zeros(end + GUARD - len(self.inside), np.bool_)])
        self.bytes[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.inside[start:end] = True
        self._places[name] = start, array

    def address(self, name: str) -> int:
        return BASE + self._places[name][0]

    def read(self, name: str) -> Array:
        start, array = self._places[name]
        return self.bytes[start : start + array.nbytes].view(array.dtype).reshape(array.shape).copy()

    def at(self, addresses: Array, size: int) -> Array:
        """Indices [lanes, size] of bytes."""
        places = addresses.astype(np.int64) - BASE
        if (places % size).any():
            raise ValueError(f"misaligned by {size}: {places}")
        index = places[:, None] + np.arange(size)
        outside = (index < 0) | (index >= len(self.inside))
        if outside.any() or not self.inside[index].all():
            raise IndexError(f"outside of all buffers: {places}")
        return index


class Transfers(Registers):
    """Loads, stores, copies and barriers."""

    def __init__(self, lanes: int, memory: Memory, shared_bytes: int, late_copies: bool) -> None:
        """late_copies: whether `cp.async` writes when it is waited for, and not at once."""
        super().__init__(lanes)
        self.memory, self.late_copies = memory, late_copies
        self.shared = np.zeros(SHARED_START + shared_bytes, np.uint8)
        self._writer = np.zeros_like(self.shared)
        """Of a byte, 1 << the warp that wrote it since the last barrier; `_readers` alike, all of them."""
        self._readers = np.zeros_like(self.shared)
        self._parameters: dict[str, Array] = {}
        self._pending: list[tuple[Array, Array, Array]] = []
        self._groups: deque[list[tuple[Array, Array, Array]]] = deque()

    def _forget(self) -> None:
        """Before a program begins."""
        self.shared[:] = 0xFF
        self._writer[:] = self._readers[:] = 0
        self._pending, self._groups = [], deque()

    def _shared_at(self, addresses: Array, size: int) -> Array:
        places = addresses.astype(np.int64)
        if (places % size).any():
            raise ValueError(f"misaligned by {size}: {places}")
        index = places[:, None] + np.arange(size)
        if (index < SHARED_START).any() or (index >= len(self.shared)).any():
            raise IndexError(f"outside of shared memory: {places}")
        return index

    def _mark(
        self, lanes: Array, index: Array, writes: bool, checks: bool = True, stays: bool = True
    ) -> None:
        """Bytes `index` [lanes, bytes] are read or written."""
        if self._lanes == WARP:
            return
        warps = np.broadcast_to((1 << lanes // WARP).astype(np.uint8)[:, None], index.shape)
        before = self._writer[index] | self._readers[index] if writes else self._writer[index]
        if checks and (before & ~warps).any():
            raise RaceError(f"{'write' if writes else 'read'} of {index[(before & ~warps).any(1)]}")
        if stays:
            np.bitwise_or.at(self._writer if writes else self._readers, index, warps)

    def _ld(self, parts: list[str], operands: list[str], active: Callable[[], Array] | None) -> Step:
        kind = parts[-1]
        if parts[1] == "param":
            value = self._parameters[operands[1].strip("[]")].view(dtype_of(kind))
            register = self._registers[operands[0]]
            to = register.view(f"{value.dtype.kind}{register.dtype.itemsize}")

            def load_parameter() -> None:
                to[:] = value

            return load_parameter
        return self._moved(parts, operands[0], operands[1], active, True)

    def _st(self, parts: list[str], operands: list[str], active: Callable[[], Array] | None) -> Step:
        return self._moved(parts, operands[1], operands[0], active, False)

    def _moved(
        self, parts: list[str], values: str, place: str, active: Callable[[], Array] | None, load: bool
    ) -> Step:
        space, kind = parts[1], parts[-1]
        if space not in ("global", "shared"):
            raise ValueError(space)
        names = [name.strip() for name in values.strip("{} ").split(",")]
        registers = [
            self._registers[name] if name in self._registers else self._of(name, kind) for name in names
        ]
        dtype = dtype_of(kind)
        width = dtype.itemsize
        if any(register.dtype.itemsize < width for register in registers):
            raise ValueError(values)
        if any(part.startswith("v") for part in parts) != (len(registers) > 1):
            raise ValueError(values)
        # A register may be wider than what is loaded: then it is extended by its sign, or by zeros.
        wide = [register.view(f"{dtype.kind}{register.dtype.itemsize}") for register in registers]
        size = width * len(registers)
        address = self._address(place, "u64" if space == "global" else "u32")
        everywhere = slice(None)

        def move() -> None:
            lanes: Any = everywhere if active is None else active()
            addresses = address()[lanes]
            if not len(addresses):
                return
            if space == "global":
                memory, index = self.memory.bytes, self.memory.at(addresses, size)
            else:
                memory, index = self.shared, self._shared_at(addresses, size)
                self._mark(self._lane[lanes], index, not load)
            if load:
                found = memory[index]
                for i, register in enumerate(wide):
                    part = np.ascontiguousarray(found[:, i * width : (i + 1) * width])
                    register[lanes] = part.view(dtype)[:, 0]
            else:
                columns = [r[lanes].view(np.uint8).reshape(len(index), -1)[:, :width] for r in registers]
                memory[index] = np.concatenate(columns, 1)

        return move

    def _cp(self, parts: list[str], operands: list[str], active: Callable[[], Array] | None) -> Step:
        if parts[2] == "commit_group":
            return self._commit
        if parts[2] == "wait_group":
            count = int(operands[0])
            return lambda: self._wait(count)
        if parts[1] != "async" or parts[3:5] != ["shared", "global"]:
            raise ValueError(parts)
        to, source = self._address(operands[0], "u32"), self._address(operands[1], "u64")
        size = int(operands[2], 0)
        valid = self._of(operands[3], "u32") if len(operands) > 3 else np.full(self._lanes, size, np.uint32)
        all_lanes = np.ones(self._lanes, np.bool_)

        def copy() -> None:
            lanes = all_lanes if active is None else active()
            index, who = self._shared_at(to()[lanes], size), self._lane[lanes]
            self._mark(who, index, True, stays=not self.late_copies)
            values = np.zeros((len(index), size), np.uint8)
            counts = valid[lanes]
            if ((counts != 0) & (counts != size)).any():
                raise UnknownInstructionError(f"cp.async of {counts} bytes")
            filled = counts == size
            if filled.any():
                values[filled] = self.memory.bytes[self.memory.at(source()[lanes][filled], size)]
            if self.late_copies:
                self._pending.append((who, index, values))
            else:
                self.shared[index] = values

        return copy

    def _commit(self) -> None:
        self._groups.append(self._pending)
        self._pending = []

    def _wait(self, count: int) -> None:
        while len(self._groups) > count:
            for who, index, values in self._groups.popleft():
                self._mark(who, index, True, checks=False)
                self.shared[index] = values

    def _ldmatrix(self, parts: list[str], operands: list[str]) -> Step:
        matrices, transposed, registers, address, addressing = self._matrices(parts, operands, 0)

        def load() -> None:
            index = self._shared_at(address()[addressing], 16)
            self._mark(self._lane[addressing], index, False)
            rows = self.shared[index].view(np.uint16).reshape(-1, matrices, 8, 8)
            if transposed:
                rows = np.ascontiguousarray(rows.transpose(0, 1, 3, 2))
            pairs = rows.reshape(-1, matrices, WARP, 2).view(np.uint32)[..., 0]
            for i, register in enumerate(registers):
                register[:] = pairs[:, i].reshape(-1)

        return load

    def _stmatrix(self, parts: list[str], operands: list[str]) -> Step:
        matrices, transposed, registers, address, addressing = self._matrices(parts, operands, 1)

        def store() -> None:
            pairs = np.stack([register.reshape(-1, WARP) for register in registers], 1)
            rows = pairs.view(np.uint16).reshape(-1, matrices, 8, 8)
            if transposed:
                rows = np.ascontiguousarray(rows.transpose(0, 1, 3, 2))
            index = self._shared_at(address()[addressing], 16)
            self._mark(self._lane[addressing], index, True)
            self.shared[index] = rows.view(np.uint8).reshape(-1, 16)

        return store

    def _matrices(
        self, parts: list[str], operands: list[str], values: int
    ) -> tuple[int, bool, list[Array], Callable[[], Array], Array]:
        if "m8n8" not in parts or parts[-1] != "b16":
            raise ValueError(parts)
        registers = self._several(operands[values], "b32")
        matrices = int(next(part for part in parts if re.fullmatch(r"x\d", part))[1:])
        if len(registers) != matrices:
            raise ValueError(operands)
        address = self._address(operands[1 - values], "u32")
        # Lanes 0-7 of a warp have the rows' addresses of the first matrix, 8-15 of the second one.
        return matrices, "trans" in parts, registers, address, self._lane % WARP < 8 * matrices

    def _bar(self, parts: list[str], operands: list[str]) -> Step | None:
        if parts[1:] == ["warp", "sync"]:
            return None
        if parts[1:] != ["sync"] or operands != ["0"]:
            raise ValueError(parts)

        def wait() -> None:
            self._writer[:] = self._readers[:] = 0

        return wait
