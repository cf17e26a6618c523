"""Runs a compiled kernel's PTX on a CPU, all lanes of a program at once; not a test by itself.

Interpreters of Triton run what a kernel says; this runs what it became: layouts of registers, fragments of
matrix units, addresses in shared memory, inline assembly. After the PTX ISA, its instructions one by one:
those of `arithmetic.py`, `memory.py` and `mma.py`. One that is not there raises
UnknownInstructionError with its line. Other than on a GPU:

    branches       lanes that disagree raise DivergenceError
    barriers       all lanes run in lockstep
    cp.async       as `late_copies` says

Registers and shared memory begin with bytes that make numbers large or NaN.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scalegate.tests.kernels.ptx.arithmetic import Arithmetic
from scalegate.tests.kernels.ptx.memory import Memory, Transfers
from scalegate.tests.kernels.ptx.mma import MatrixUnits
from scalegate.tests.kernels.ptx.registers import WARP, Array, Step, UnknownInstructionError, dtype_of

WIDTHS = {"pred": 1, "b16": 2, "b32": 4, "b64": 8}
SPECIAL = ("tid", "ntid", "ctaid", "nctaid")


class DivergenceError(Exception):
    """Lanes take different branches."""


@dataclass
class _Block:
    steps: list[Step] = field(default_factory=list)
    branch: Callable[[], int | None] | None = None
    """The block to go on with, or None: the next."""


class Kernel(Arithmetic, Transfers, MatrixUnits):
    """One entry of PTX.

    late_copies: whether `cp.async` writes when it is waited for, and not at once: the two show missing waits,
    and copies into what is still read.
    """

    def __init__(self, ptx: str, shared_bytes: int, memory: Memory, late_copies: bool = True) -> None:
        lanes = int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]
        super().__init__(lanes, memory, shared_bytes, late_copies)
        self._special |= {f"%{kind}.{axis}": np.zeros(lanes, np.uint32) for kind in SPECIAL for axis in "xyz"}
        self._special["%tid.x"][:] = self._lane
        self._special["%ntid.x"][:] = lanes
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
        # From 3.8 on Triton says which shared memory: a program's own, as is meant without that word.
        body = body.replace("shared::cta", "shared")
        lines = re.split(
            r"[;\n]|(?<=[^:]:)(?!:)", re.sub(r"\.reg \.\w+\s+%\w+<\d+>;|\{(?=\s*\.reg)", ";", body)
        )
        for line in map(str.strip, self._joined(lines)):
            self._compile(line)

    @staticmethod
    def _joined(lines: Sequence[str]) -> list[str]:
        """Without what says nothing to do."""
        skipped = (".loc", ".pragma")
        return [line for line in lines if line.strip(" \t{}") and not line.strip().startswith(skipped)]

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
        self._forget()
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
        if "L2::cache_hint" in parts:
            operands.pop()  # A policy of the cache, which changes no value.
        if parts[0] in ("bra", "ret"):
            self._branch(parts[0], operands, guard)
            return
        make = getattr(self, f"_{parts[0]}", None)
        if make is None:
            raise UnknownInstructionError(line)
        active = self._active(guard)
        if active is not None and parts[0] not in ("ld", "st", "cp"):
            raise UnknownInstructionError(f"predicated: {line}")
        try:
            step = make(parts, operands, *([active] if parts[0] in ("ld", "st", "cp") else []))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UnknownInstructionError(line) from error
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

    def _shfl(self, parts: list[str], operands: list[str]) -> Step:
        mode, kind = parts[2], parts[3]
        if operands[3] not in ("31", "0x1f") or int(operands[4], 0) & 0xFFFFFFFF != 0xFFFFFFFF:
            raise ValueError(operands)
        to, value, by = self._to(operands[0], kind), self._of(operands[1], kind), self._of(operands[2], "u32")
        if mode == "bfly":
            return lambda: np.copyto(to, value[self._lane ^ by & 31])
        if mode == "idx":
            return lambda: np.copyto(to, value[self._lane // WARP * WARP + (by & 31)])
        raise ValueError(mode)

    def _createpolicy(self, parts: list[str], operands: list[str]) -> None:
        """What a cache keeps changes no value."""

    def _griddepcontrol(self, parts: list[str], operands: list[str]) -> None:
        """Programs run one after another."""
