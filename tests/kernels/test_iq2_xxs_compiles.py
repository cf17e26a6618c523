"""What the compiler makes of the IQ2_XXS product, with no GPU: look-ups, no spills, few instructions."""

import functools
import re
import subprocess
from pathlib import Path

import pytest
import triton
from scalegate.kernels.iq2_xxs import matmul
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FORMS = {"one row": (matmul.TILES[1], 1), "sixteen rows, split": (matmul.TILES[16], 2)}
EVERY = pytest.mark.parametrize(("tile", "splits"), FORMS.values(), ids=FORMS)
LOOK_UP = r"LDS\.128 R\d+, \[R\d+\+UR\d+\]"
"""The address is a lane's own offset; that of the codebook is in a uniform register."""
CODEBOOK_BYTES = 65536
MOST_INSTRUCTIONS = 2.7
"""A weight, of the whole loop with one row of x; what ends a tile is counted too, though it comes seldom."""


@functools.cache
def compiled(tile: matmul.Tile, splits: int):
    kernel, constants = matmul.iq2_xxs_kernel, tile.constants(splits, half=False)
    pointers = dict.fromkeys(("x", "words", "scales", "codebook", "semaphores"), "*i32")
    signature = dict.fromkeys(kernel.arg_names, "i32") | pointers | {"y": "*bf16", "partials": "*fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {name: (kernel.arg_names.index(name),) for name in signature}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in (*pointers, "y", "partials", "N", "K")}
    source = GluonASTSource(kernel, signature, {places[n]: v for n, v in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=tile.options())


def disassembled(tile: matmul.Tile, splits: int, folder: Path) -> list[tuple[int, str]]:
    """Addresses and instructions."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled(tile, splits).asm["cubin"])
    text = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True)
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text.stdout)
    return [(int(address, 16), instruction) for address, instruction in found]


def main_loop(tile: matmul.Tile, splits: int, folder: Path) -> list[str]:
    """The instructions between the jump back that spans all products and where it leads."""
    instructions = disassembled(tile, splits, folder)
    loops = []
    for address, text in instructions:
        target = re.search(r"BRA\S* .*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            loops.append([t for a, t in instructions if int(target[1], 16) <= a <= address])
    return max(loops, key=lambda loop: (count(loop, "HMMA"), -len(loop)))


def count(instructions: list[str], name: str) -> int:
    return sum(re.search(name, text) is not None for text in instructions)


@EVERY
def test_every_look_up_is_one_load_of_16_bytes_and_nothing_spills(tile, splits, tmp_path: Path):
    loop = main_loop(tile, splits, tmp_path)
    look_ups, products = count(loop, LOOK_UP), count(loop, "HMMA")
    assert products == look_ups * max(1, tile.token_tiles) == 16 * tile.strips * max(1, tile.token_tiles)
    assert count(loop, "PRMT") >= look_ups
    assert not count(loop, r"\b(LDL|STL)\b")


@EVERY
def test_the_codebook_lies_where_the_ptx_looks_for_it(tile, splits):
    kernel = compiled(tile, splits)
    ptx = kernel.asm["ptx"]
    others = [int(offset) for offset in re.findall(r"global_smem\+(\d+)", ptx)]
    # Whatever else the compiler keeps in shared memory comes behind, so the codebook is at the start.
    assert all(offset >= CODEBOOK_BYTES for offset in others) and bool(others) == (splits > 1)
    assert CODEBOOK_BYTES < kernel.metadata.shared < CODEBOOK_BYTES + 8192


def test_few_instructions_are_spent_on_a_weight(tmp_path: Path):
    loop = main_loop(*FORMS["one row"], tmp_path)
    assert len(loop) / (8 * count(loop, LOOK_UP)) <= MOST_INSTRUCTIONS
