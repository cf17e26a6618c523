"""What of the experts' kernels needs no compiler: the choice of tiles, and the PTX that unpacks INT4."""

import numpy as np
import pytest
import torch
from scalegate.kernels.experts import int4, packed, unquantized
from scalegate.kernels.experts.tile import BLOCK_ROWS, ROWS_PER_EXPERT, bucket_of


def test_buckets_go_by_rows_an_expert_gets_whatever_the_number_of_experts():
    assert bucket_of(8, 128) == 0 and bucket_of(2, 8) == 0
    for experts in (8, 128):
        for bucket, limit in enumerate(ROWS_PER_EXPERT[:-1]):
            assert bucket_of(int(limit * experts), experts) == bucket
            assert bucket_of(int(limit * experts) + 1, experts) == bucket + 1
    assert len(BLOCK_ROWS) == len(ROWS_PER_EXPERT) == len(packed.TILES) == len(unquantized.TILES)


def bits(value: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return value.to(dtype).view(torch.int16).numpy().astype(np.uint32) & 0xFFFF


def halves(register: np.ndarray, dtype: torch.dtype) -> list[torch.Tensor]:
    parts = ((register >> shift & 0xFFFF).astype(np.uint16).view(np.int16) for shift in (0, 16))
    return [torch.from_numpy(part.copy()).view(dtype).double() for part in parts]


def executed(asm: str, operands: dict[str, np.ndarray], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The registers after the few instructions that `unpack_asm` uses, each lane an element of the arrays."""
    registers = dict(operands)

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in asm.strip("{}\n").split("\n"):
        opcode, _, rest = line.rstrip(";").partition(" ")
        to, *inputs = [part.strip() for part in rest.split(",")]
        if opcode == ".reg":
            continue
        given = [value(name) for name in inputs]
        if opcode == "mov.b32":
            answer = given[0]
        elif opcode == "shr.u32":
            answer = given[0] >> given[1]
        elif opcode == "lop3.b32" and given[3] == 0xEA:
            answer = given[0] & given[1] | given[2]
        elif opcode == "prmt.b32" and given[2] in (0x1010, 0x3232):
            half = given[0] >> np.uint32(16 if given[2] == 0x3232 else 0) & np.uint32(0xFFFF)
            answer = half | half << np.uint32(16)
        elif opcode.startswith("fma.rn."):
            low, high = (
                bits(a * b + c, dtype) for a, b, c in zip(*(halves(g, dtype) for g in given), strict=True)
            )
            answer = low | high << np.uint32(16)
        else:
            raise AssertionError(line)
        registers[to] = np.broadcast_to(np.asarray(answer, np.uint32), next(iter(operands.values())).shape)
    return registers


def plain(value):
    """What a constant of Triton's holds."""
    return getattr(value, "value", value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fractional", [False, True])
@pytest.mark.parametrize("group", int4.GROUPS)
def test_the_ptx_unpacks_what_was_packed(group, fractional, dtype):
    """The interpreter cannot run PTX, so its instructions are carried out here, for every pair of words."""
    torch.manual_seed(5)
    codes = torch.randint(0, 256, (1, 64, 64), dtype=torch.uint8)
    scale, zero = torch.rand(1, 64, 128 // group) * 0.02 + 0.001, torch.rand(1, 64, 128 // group) * 15
    words, scale_words = int4.pack(codes, scale, zero if fractional else zero.to(torch.uint8), group, dtype)
    expected = int4.reference_weight(words, scale_words, 64, group, fractional, dtype)[0]
    pairs = words.view(64, 8, 2).numpy().view(np.uint32)
    inputs = [pairs[..., 0], pairs[..., 1]]
    for i in range(128 // group):
        of_rows = np.repeat(scale_words[0, i].numpy().view(np.uint32)[:, None], 8, 1)
        inputs += [of_rows, of_rows]
    for part, parts in [(part, count) for count in (1, 2, 4) for part in range(count)]:
        slices = plain(packed.slices_of(part, parts))
        operands = {f"${len(slices) + i}": given for i, given in enumerate(inputs)}
        asm = plain(int4.unpack_asm(group, fractional, dtype == torch.float16, slices))
        registers = executed(asm, operands, dtype)
        for at, j in enumerate(slices):
            even, odd = halves(registers[f"${at}"], dtype)
            slice_of = torch.stack((even, odd), -1).flatten(1)
            assert torch.equal(slice_of, expected[:, 16 * j : 16 * j + 16].double()), (parts, j)
