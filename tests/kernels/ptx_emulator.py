"""Runs a compiled kernel's PTX on a CPU, all lanes of a program at once; not a test by itself.

Interpreters of Triton run what a kernel says; this runs what it became: layouts of registers, fragments of
matrix units, addresses in shared memory, inline assembly. After the PTX ISA: its instructions one by one, its
tables for the fragments of `mma`, `ldmatrix` and `stmatrix`. An instruction that is not here raises
NotImplementedError with its line. Other than on a GPU:

    branches       lanes that disagree raise DivergenceError
    barriers       all lanes run in lockstep; a warp that meets what another one did to shared memory since
                   the last `bar.sync` raises RaceError, races of one warp's lanes are not seen
    cp.async       as `late_copies` says
    last bits      ex2, lg2 and div are exact but for rounding; fma.f32 is at times rounded twice

Addresses outside of a buffer and misaligned ones raise. Registers and shared memory begin with bytes that
make numbers large or NaN.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Step = Callable[[], None]

WARP = 32
ROW, PLACE = np.arange(WARP) // 4, np.arange(WARP) % 4
"""Of a lane in fragments: groupID and threadID_in_group."""
BASE = 1 << 33
"""Of global memory: no address fits in 32 bits."""
SHARED_START = 1024
"""Of the kernel's own shared memory."""
ALIGNED = 256
GUARD = 4096
"""Bytes between buffers, which nothing may touch."""
WIDTHS = {"pred": 1, "b16": 2, "b32": 4, "b64": 8}
COMPARISONS: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
NUMBER_TYPES = {"u": "uint", "s": "int", "b": "uint", "f": "float"}


class DivergenceError(Exception):
    """Lanes take different branches."""


class RaceError(Exception):
    """A warp meets what another one did to shared memory since the last barrier."""


def dtype_of(kind: str) -> np.dtype[Any]:
    """Of a PTX type such as `s32`."""
    if kind == "pred":
        return np.dtype(np.bool_)
    return np.dtype(NUMBER_TYPES[kind[0]] + kind[1:])


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


@dataclass
class _Block:
    steps: list[Step] = field(default_factory=list)
    branch: Callable[[], int | None] | None = None
    """The block to go on with, or None: the next."""


class Kernel:
    """One entry of PTX.

    late_copies: whether `cp.async` writes when it is waited for, and not at once: the two show missing waits,
    and copies into what is still read.
    """

    def __init__(self, ptx: str, shared_bytes: int, memory: Memory, late_copies: bool = True) -> None:
        self.memory, self.late_copies = memory, late_copies
        self._lanes = int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]
        self._lane = np.arange(self._lanes)
        self.shared = np.zeros(SHARED_START + shared_bytes, np.uint8)
        self._writer = np.zeros_like(self.shared)
        """Of a byte, 1 << the warp that wrote it since the last barrier; `_readers` alike, all of them."""
        self._readers = np.zeros_like(self.shared)
        self._registers: dict[str, Array] = {}
        self._parameters: dict[str, Array] = {}
        self._special = {
            f"%{kind}.{axis}": np.zeros(self._lanes, np.uint32) for kind in KINDS for axis in "xyz"
        }
        self._special["%tid.x"][:] = self._lane
        self._special["%ntid.x"][:] = self._lanes
        self._pending: list[tuple[Array, Array, Array]] = []
        self._groups: deque[list[tuple[Array, Array, Array]]] = deque()
        head, body = re.search(r"\.entry[^(]*\((.*?)\)[^{]*\{(.*?)\n\}", ptx, re.S).groups()  # type: ignore[union-attr]
        for kind, name in re.findall(r"\.param \.(\w+)[^,\n]*?(\w+_param_\d+)", head):
            self._parameters[name] = np.zeros(self._lanes, dtype_of(kind))
        body = re.sub(r"//[^\n]*", "", body)
        for kind, name, count in re.findall(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>;", body):
            for i in range(int(count)):
                self._registers[f"{name}{i}"] = np.zeros(
                    self._lanes, np.bool_ if kind == "pred" else f"u{WIDTHS[kind]}"
                )
        self._blocks, self._labels = [_Block()], {}
        lines = re.split(r"[;\n]|(?<=:)", re.sub(r"\.reg \.\w+\s+%\w+<\d+>;|\{(?=\s*\.reg)", ";", body))
        for line in map(str.strip, self._joined(lines)):
            self._compile(line)

    @staticmethod
    def _joined(lines: Sequence[str]) -> list[str]:
        """Without what says nothing to do."""
        skipped = (".loc", ".pragma")
        return [one for one in lines if one.strip(" \t{}") and not one.strip().startswith(skipped)]

    # Launches

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[int | float]) -> None:
        """All programs of the grid one after another; arguments in the order of the parameters."""
        # Triton's last two are scratch that these kernels have none of.
        names = list(self._parameters)[:-2]
        for name, value in zip(names, arguments, strict=True):
            self._parameters[name][:] = value
        for axis, count in zip("xyz", grid, strict=True):
            self._special[f"%nctaid.{axis}"][:] = count
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    self._run(x, y, z)

    def _run(self, *program: int) -> None:
        for axis, number in zip("xyz", program, strict=True):
            self._special[f"%ctaid.{axis}"][:] = number
        self.shared[:] = 0xFF
        self._writer[:] = self._readers[:] = 0
        self._pending, self._groups = [], deque()
        for register in self._registers.values():
            register.view(np.uint8)[:] = 0xA5 if register.dtype != np.bool_ else 0
        at = 0
        with np.errstate(all="ignore"):
            while at < len(self._blocks):
                block = self._blocks[at]
                for step in block.steps:
                    step()
                to = block.branch() if block.branch else None
                at = at + 1 if to is None else to

    # Lines

    def _compile(self, line: str) -> None:
        if line.endswith(":"):
            self._blocks.append(_Block())
            self._labels[line[:-1]] = len(self._blocks) - 1
            return
        if line.startswith(".reg"):
            _, kind, names = line.replace(",", " ").split(None, 2)
            for name in names.split():
                self._registers[name] = np.zeros(self._lanes, np.dtype(f"u{WIDTHS[kind[1:]]}"))
            return
        guard = None
        matched = re.match(r"@(!?)(%\w+)\s+(.*)", line, re.S)
        if matched:
            guard, line = (matched[1] == "!", self._registers[matched[2]]), matched[3]
        name, *rest = line.split()
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,]+", "".join(rest))
        parts = name.split(".")
        if parts[0] in ("bra", "ret"):
            self._branch(parts[0], operands, guard)
            return
        make = getattr(self, f"_{parts[0]}", None)
        if make is None:
            raise NotImplementedError(line)
        active = self._active(guard)
        if active is not None and parts[0] not in ("ld", "st", "cp"):
            raise NotImplementedError(f"predicated: {line}")
        try:
            step = make(parts, operands, *([active] if parts[0] in ("ld", "st", "cp") else []))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise NotImplementedError(line) from error
        if step is not None:
            self._blocks[-1].steps.append(step)

    def _active(self, guard: tuple[bool, Array] | None) -> Callable[[], Array] | None:
        if guard is None:
            return None
        negated, predicate = guard
        return (lambda: ~predicate) if negated else (lambda: predicate)

    def _branch(self, name: str, operands: list[str], guard: tuple[bool, Array] | None) -> None:
        active, labels, last = self._active(guard), self._labels, 1 << 30

        def branch() -> int | None:
            to = last if name == "ret" else labels[operands[0]]
            if active is None:
                return to
            taken = active()
            if taken.any() != taken.all():
                raise DivergenceError(f"{name} {operands}: {taken}")
            return to if taken[0] else None

        self._blocks[-1].branch = branch
        self._blocks.append(_Block())

    # Operands

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
        names = [one.strip() for one in text.strip("{} ").split(",")]
        return [self._of(one, kind) for one in names]

    # Memory

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
            raise NotImplementedError(space)
        names = [one.strip() for one in values.strip("{} ").split(",")]
        registers = [self._registers[one] if one in self._registers else self._of(one, kind) for one in names]
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
            raise NotImplementedError(parts)
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
                raise NotImplementedError(f"cp.async of {counts} bytes")
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
            raise NotImplementedError(parts)
        registers = self._several(operands[values], "b32")
        matrices = int(next(part for part in parts if re.fullmatch(r"x\d", part))[1:])
        if len(registers) != matrices:
            raise ValueError(operands)
        address = self._address(operands[1 - values], "u32")
        # Lanes 0-7 of a warp have the rows' addresses of the first matrix, 8-15 of the second one.
        return matrices, "trans" in parts, registers, address, self._lane % WARP < 8 * matrices

    # Matrix units

    def _mma(self, parts: list[str], operands: list[str]) -> Step:
        kinds, shape = parts[-4:], parts[3]
        if parts[1:3] != ["sync", "aligned"] or parts[4:6] != ["row", "col"]:
            raise NotImplementedError(parts)
        to = self._several(operands[0], kinds[0])
        acc = self._several(operands[3], kinds[3])
        a, b = self._several(operands[1], "b32"), self._several(operands[2], "b32")
        if shape == "m16n8k32" and kinds == ["s32", "s8", "s8", "s32"]:
            depth, saturates = 32, parts[6] == "satfinite"
        elif shape == "m16n8k16" and kinds[0] == kinds[3] == "f32" and kinds[1] == kinds[2]:
            depth, saturates = 16, False
        else:
            raise NotImplementedError(parts)
        if (len(to), len(a), len(b), len(acc)) != (4, 4, 2, 4):
            raise ValueError(operands)
        each = 32 // depth
        """Bytes of an element: a register has 4 // each of them."""
        count = 4 // each

        def widened(registers: list[Array]) -> Array:
            """[warps, registers, lanes, elements]"""
            bits = np.stack([register.reshape(-1, WARP) for register in registers], 1)
            shape = (*bits.shape, count)
            if depth == 32:
                return bits.view(np.int8).reshape(shape).astype(np.float64)
            halves = bits.view(np.uint16).reshape(shape)
            if kinds[1] == "f16":
                return halves.view(np.float16).astype(np.float64)
            return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

        element = np.arange(count)
        warps = self._lanes // WARP
        left, right, out = (np.zeros((warps, *shape)) for shape in ((16, depth), (depth, 8), (16, 8)))
        a_rows = np.stack([ROW, ROW + 8, ROW, ROW + 8])[:, :, None]
        near = (PLACE * count)[:, None] + element
        a_columns = np.stack([near, near, near + depth // 2, near + depth // 2])
        b_rows = np.stack([near, near + depth // 2])
        rows, columns = np.stack([ROW, ROW, ROW + 8, ROW + 8]), np.stack([2 * PLACE, 2 * PLACE + 1] * 2)
        limit = np.iinfo(np.int32)

        def multiply() -> None:
            left[:, a_rows, a_columns] = widened(a)
            right[:, b_rows, ROW[None, :, None]] = widened(b)
            out[:, rows, columns] = np.stack([register.reshape(-1, WARP) for register in acc], 1)
            # Exact for integers: all sums are below 2^53.
            result = (left @ right + out)[:, rows, columns]
            if depth == 32:
                whole = result.astype(np.int64)
                fits = np.clip(whole, limit.min, limit.max)
                result = fits if saturates else whole.astype(np.int32)
            for i, register in enumerate(to):
                register[:] = result[:, i].reshape(-1)

        return multiply

    # Lanes

    def _shfl(self, parts: list[str], operands: list[str]) -> Step:
        mode, kind = parts[2], parts[3]
        if operands[3] not in ("31", "0x1f") or int(operands[4], 0) & 0xFFFFFFFF != 0xFFFFFFFF:
            raise NotImplementedError(operands)
        to, value, by = self._to(operands[0], kind), self._of(operands[1], kind), self._of(operands[2], "u32")
        if mode == "bfly":
            return lambda: np.copyto(to, value[self._lane ^ by & 31])
        if mode == "idx":
            return lambda: np.copyto(to, value[self._lane // WARP * WARP + (by & 31)])
        raise NotImplementedError(mode)

    def _bar(self, parts: list[str], operands: list[str]) -> Step | None:
        if parts[1:] == ["warp", "sync"]:
            return None
        if parts[1:] != ["sync"] or operands != ["0"]:
            raise NotImplementedError(parts)

        def wait() -> None:
            self._writer[:] = self._readers[:] = 0

        return wait

    def _griddepcontrol(self, parts: list[str], operands: list[str]) -> None:
        """Programs run one after another."""

    # Numbers

    def _plain(self, kind: str, operands: list[str], operation: Callable[..., Array]) -> Step:
        to, values = self._to(operands[0], kind), [self._of(one, kind) for one in operands[1:]]

        def step() -> None:
            to[:] = operation(*values)

        return step

    def _flushed(self, parts: list[str], operands: list[str], operation: Callable[..., Array]) -> Step:
        kind = parts[-1]
        if "ftz" not in parts:
            return self._plain(kind, operands, operation)
        least = np.float32(2.0**-126)

        def flush(x: Array) -> Array:
            return np.where(np.abs(x) < least, np.copysign(np.float32(0), x), x)

        return self._plain(kind, operands, lambda *x: flush(operation(*map(flush, x)).astype(np.float32)))

    @staticmethod
    def _allow(parts: list[str], allowed: str) -> None:
        """Modifiers that are known, besides types."""
        unknown = set(parts[1:-1]) - set(allowed.split())
        if unknown:
            raise NotImplementedError(str(unknown))

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

    # Bits

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
            raise NotImplementedError(kind)
        to, value = self._to(operands[0], kind), self._of(operands[1], kind)
        start, length = int(operands[2], 0), int(operands[3], 0)
        if not 0 < length <= 32 - start:
            raise NotImplementedError(operands)
        return lambda: np.copyto(to, value << (32 - start - length) >> (32 - length))

    def _prmt(self, parts: list[str], operands: list[str]) -> Step:
        if parts[1:] != ["b32"]:
            raise NotImplementedError(parts)
        to = self._to(operands[0], "b32").view(np.uint8).reshape(self._lanes, 4)
        a, b, select = (self._of(one, "b32") for one in operands[1:])
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

    # Choices and conversions

    def _setp(self, parts: list[str], operands: list[str]) -> Step:
        if len(parts) != 3 or len(operands) != 3:
            raise NotImplementedError(parts)
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
        to, x, y = (self._of(one, kind) for one in operands[:3])
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
                raise NotImplementedError(parts)
            both = self._to(operands[0], "b32").view(np.uint16).reshape(self._lanes, 2)
            high, low = (self._of(one, "f32") for one in operands[1:])
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
            raise NotImplementedError(parts)
        to, value = self._to(operands[0], target), self._of(operands[1], source)
        return lambda: np.copyto(to, value.astype(to.dtype))


KINDS = ("tid", "ntid", "ctaid", "nctaid")


def to_bf16(x: Array) -> Array:
    """fp32 → bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)
