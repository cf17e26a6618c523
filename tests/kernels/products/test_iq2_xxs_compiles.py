"""What the compiler makes of the IQ2_XXS products, with no GPU: wide look-ups, no spills."""

import functools
import re

import pytest

pytest.importorskip("triton")

import triton
from scalegate.kernels.iq2_xxs import one_row
from scalegate.kernels.iq2_xxs.decoder import IQ2XXSDecoder
from scalegate.kernels.iq2_xxs.lookup import TABLE_BYTES
from scalegate.kernels.iq2_xxs.matmul import ONE_ROW, ONE_ROW_OF_MANY, TILES
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.hopper_compiler import (
    assembler_notes,
    compiled,
    disassembled,
    loop_instructions,
    name_of,
    spilled,
)
from scalegate.tests.kernels.triton_versions import bound
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

DECODER = IQ2XXSDecoder(half=False)
EVERY = pytest.mark.parametrize("tile", exhaustive_but(TILES, TILES[1], TILES[-1]), ids=name_of)
ONE_ROW_TILES = (*ONE_ROW.values(), ONE_ROW_OF_MANY)
EVERY_ONE_ROW = pytest.mark.parametrize("tile", exhaustive_but(ONE_ROW_TILES, ONE_ROW_TILES[0]), ids=str)
LOOK_UP = re.compile(r"LDS\.128 R\d+, \[R\d+\+UR\d+\]")
"""The address is the lane's own; that of the codebook is in a uniform register."""
UNWANTED = re.compile(r"\b(I2F|I2FP|F2F|PRMT|LDL|STL)\b")
MOST_INSTRUCTIONS = {8: 2.7, 16: 2.7, 32: 2.9, 64: 2.8}
"""Of the stream-K loop a weight, by rows of x."""
MOST_INSTRUCTIONS_ONE_ROW = 2.9
"""Of the whole loop; what ends a tile is counted too, though it comes seldom."""


@functools.cache
def compiled_one_row(tile: one_row.Tile, splits: int):
    kernel, constants = one_row.iq2_xxs_one_row_kernel, tile.constants(splits, half=False)
    pointers = {"x": "*bf16", "y": "*bf16", "factor": "*fp32", "partials": "*fp32"}
    pointers |= dict.fromkeys(("words", "scales", "codebook", "semaphores"), "*i32")
    signature = dict.fromkeys(kernel.arg_names, "i32") | pointers | dict.fromkeys(constants, "constexpr")
    places = {name: (kernel.arg_names.index(name),) for name in signature}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in (*pointers, "N", "K")}
    source = GluonASTSource(kernel, signature, {places[n]: v for n, v in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=tile.options())


def count(instructions: list[str], pattern: str | re.Pattern) -> int:
    return sum(re.search(pattern, text) is not None for text in instructions)


def one_row_loop(tile: one_row.Tile, folder) -> list[str]:
    """The shortest loop with all products; each instruction takes 16 bytes."""
    instructions = disassembled(compiled_one_row(tile, 1), folder)
    loops = []
    for end, text in enumerate(instructions):
        branch = re.search(r"\bBRA (0x[0-9a-f]+)", text)
        if branch and int(branch[1], 16) // 16 < end:
            loops.append(instructions[int(branch[1], 16) // 16 : end + 1])
    return max(loops, key=lambda loop: (count(loop, "HMMA"), -len(loop)))


@EVERY
@pytest.mark.parametrize("odd_rows", exhaustive_but([False, True], False))
def test_it_is_decoded_without_conversions_or_spills_and_fits_an_sm(tile, odd_rows, tmp_path):
    kernel = compiled(tile, DECODER, factor=True, odd_rows=odd_rows)
    instructions = disassembled(kernel, tmp_path)
    products = [i for i, text in enumerate(instructions) if "HGMMA" in text]
    assert len(products) >= 4
    assert not [text for text in instructions[products[0] : products[-1]] if UNWANTED.search(text)]
    notes = assembler_notes(kernel, tmp_path)
    # Storing odd rows of y may take registers from the stack, behind the products; 3.9 takes a few anyway.
    assert odd_rows or spilled(notes) <= bound(0, 0, 0, 24)
    assert "serialized" not in notes
    assert tile.ctas_per_sm * (kernel.metadata.shared + 1024) <= 228 * 1024
    assert tile.ctas_per_sm * (tile.n // 16 + 4) * 32 * tile.registers <= 65536


@pytest.mark.parametrize(
    "tile", exhaustive_but([tile for tile in TILES if tile.slices > 1], TILES[1]), ids=name_of
)
def test_few_instructions_are_spent_on_a_weight_and_one_look_up_on_eight(tile, tmp_path):
    loop = loop_instructions(disassembled(compiled(tile, DECODER, factor=True), tmp_path))
    products = count(loop, "HGMMA")
    assert count(loop, LOOK_UP) == products
    assert len(loop) <= (MOST_INSTRUCTIONS[tile.m] + bound(0.0, 0.0, 0.0, 0.05)) * 8 * products


@EVERY
def test_the_codebook_and_the_ring_lie_where_the_ptx_looks_for_them(tile):
    kernel = compiled(tile, DECODER, factor=True)
    others = [int(offset) for offset in re.findall(r"global_smem\+(\d+)", kernel.asm["ptx"])]
    # Whatever else the compiler keeps in shared memory comes behind.
    assert others and min(others) >= TABLE_BYTES
    assert 0 < kernel.metadata.shared - min(others) < 1024


@EVERY_ONE_ROW
def test_one_row_looks_up_16_bytes_at_once_and_spills_nothing(tile, tmp_path):
    loop = one_row_loop(tile, tmp_path)
    assert count(loop, LOOK_UP) == count(loop, "HMMA") == 16 * tile.strips
    # What is loaded once a turn, where a thread has few registers.
    assert count(loop, r"\b(LDL|STL)\b") <= bound(0, 0, 1, 1)


@pytest.mark.parametrize("splits", exhaustive_but([1, 2], 1))
def test_the_codebook_of_one_row_lies_at_the_start_of_shared_memory(splits):
    kernel = compiled_one_row(ONE_ROW_TILES[0], splits)
    others = [int(offset) for offset in re.findall(r"global_smem\+(\d+)", kernel.asm["ptx"])]
    assert all(offset >= TABLE_BYTES for offset in others) and bool(others) == (splits > 1)
    assert TABLE_BYTES < kernel.metadata.shared < TABLE_BYTES + 8192


@EVERY_ONE_ROW
def test_few_instructions_are_spent_on_a_weight_with_one_row(tile, tmp_path):
    loop = one_row_loop(tile, tmp_path)
    assert len(loop) <= MOST_INSTRUCTIONS_ONE_ROW * 8 * count(loop, LOOK_UP) + bound(0, 2, 2, 2)
