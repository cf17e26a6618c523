"""What the compiler makes of E4M3 rows, with no GPU: wgmma in E4M3 from shared memory, without spills."""

import re

import pytest

pytest.importorskip("triton")

from scalegate.kernels.fp8 import hopper_matmul
from scalegate.kernels.fp8.rows import E4M3Rows
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.hopper_compiler import (
    assembler_notes,
    compiled,
    disassembled,
    loop_instructions,
    name_of,
    spilled,
)

TILES = [*hopper_matmul.TILES.values(), *hopper_matmul.WIDE_TILES.values()]


@pytest.mark.parametrize("tile", exhaustive_but(TILES, TILES[0], TILES[-1]), ids=name_of)
def test_tiles_multiply_from_shared_memory_and_convert_and_spill_nothing(tile, tmp_path):
    kernel = compiled(tile, E4M3Rows(half=False), factor=True)
    loop = loop_instructions(disassembled(kernel, tmp_path))
    assert sum("QGMMA" in text for text in loop) >= 4
    assert not [text for text in loop if re.search(r"\b(I2F|F2F|F2FP|PRMT|LDL|STL|MEMBAR)\b", text)]
    notes = assembler_notes(kernel, tmp_path)
    assert "serialized" not in notes
    assert spilled(notes) == 0
    assert tile.ctas_per_sm * (kernel.metadata.shared + 1024) <= 228 * 1024
    assert tile.ctas_per_sm * (tile.n // 16 + 4) * 32 * tile.registers <= 65536
