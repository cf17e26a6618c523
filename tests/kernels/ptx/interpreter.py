"""Executes the few PTX instructions that decoders are written in, on whole tensors; not a test by itself."""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
SHARED_START = 1024


def execute(text: str, results: int, arguments: list[Tensor], shared: Tensor | None = None) -> list[Tensor]:
    """The results of PTX as `hopper.ptx.ptx` writes it: operands $0, $1 ..., results first; int64 of 32 bits.

    shared: int64 words of shared memory from `global_smem` on; all threads load before any of them stores.
    Raises KeyError for an instruction that it does not know and for a register that is read unwritten.
    """
    registers = {f"${results + i}": argument.long() & MASK for i, argument in enumerate(arguments)}
    registers["global_smem"] = torch.tensor(SHARED_START)
    for line in (line.strip() for line in re.split(r"[;\n]", text)):
        if (line and line[0] not in "{}.") or line.startswith("{half"):
            _step(line, registers, shared)
    return [registers[f"${i}"] for i in range(results)]


def _access(name: str, parts: list[str], registers: dict[str, Tensor], shared: Tensor) -> None:
    """`ld.shared.v4.b32 {a,b,c,d}, [address+offset]`, and stores."""
    store = name.startswith("st")
    place, values = parts if store else parts[::-1]
    address, offset = place.strip("[]").split("+")
    first = registers[address] + int(offset) - SHARED_START
    names = values.strip("{}").split(",")
    if (first % (4 * len(names))).any():
        raise ValueError(f"misaligned: {name} {place}")
    for i, part in enumerate(names):
        if store:
            shared[first // 4 + i] = registers[part]
        else:
            registers[part] = shared[first // 4 + i]


def _step(line: str, registers: dict[str, Tensor], shared: Tensor | None) -> None:
    name, rest = line.split(None, 1)
    parts = re.findall(r"\{[^}]*\}|[^,]+", rest.replace(" ", ""))
    if ".shared." in name and shared is not None:
        _access(name, parts, registers, shared)
        return
    if name == "mov.b32" and parts[0].startswith("{"):
        value = registers[parts[1]]
        low, high = parts[0].strip("{}").split(",")
        registers[low], registers[high] = value & 0xFFFF, value >> 16
        return
    if name == "mov.b32" and parts[1].startswith("{"):
        low, high = (registers[part] for part in parts[1].strip("{}").split(","))
        registers[parts[0]] = low | high << 16
        return
    values = [registers[part] if part in registers else torch.tensor(int(part, 0)) for part in parts[1:]]
    registers[parts[0]] = INSTRUCTIONS[name](*values) & MASK


def _funnel_left(low: Tensor, high: Tensor, by: Tensor) -> Tensor:
    return (high << 32 | low) << by >> 32


def _permute(a: Tensor, b: Tensor, select: Tensor) -> Tensor:
    both = b << 32 | a
    return sum((both >> 8 * (select >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    terms = [
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1
    ]
    return torch.stack(torch.broadcast_tensors(*terms)).sum(0)  # the terms have no bit in common


def _multiply_bf16x2(a: Tensor, b: Tensor) -> Tensor:
    low, high = (_bf16(a >> at) * _bf16(b >> at) for at in (0, 16))
    return _bits(low) | _bits(high) << 16


def _multiply_add_bf16x2(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    low, high = (_bf16(a >> at) * _bf16(b >> at) + _bf16(c >> at) for at in (0, 16))
    return _bits(low) | _bits(high) << 16


def _bf16(bits: Tensor) -> Tensor:
    return ((bits & 0xFFFF) << 16).int().view(torch.float32).double()


def _bits(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16).view(torch.int16).long() & 0xFFFF


INSTRUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, by: a << by,
    "shr.u32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "prmt.b32": _permute,
    "shf.l.wrap.b32": _funnel_left,
    "mul.rn.bf16x2": _multiply_bf16x2,
    "fma.rn.bf16x2": _multiply_add_bf16x2,
}
