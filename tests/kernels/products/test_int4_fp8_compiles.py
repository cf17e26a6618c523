"""What the compiler makes of INT4 with FP8 activations, with no GPU: wgmma in E4M3 without spills."""

import re

import pytest

pytest.importorskip("triton")

from scalegate.kernels.int4 import e4m3_matmul
from scalegate.kernels.int4.e4m3_decoder import Int4E4M3Decoder
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.hopper_compiler import (
    assembler_notes,
    compiled,
    disassembled,
    loop_instructions,
    name_of,
)

TILES = list(e4m3_matmul.TILES)


@pytest.mark.parametrize("tile", exhaustive_but(TILES, TILES[1], TILES[-1]), ids=name_of)
def test_tiles_use_wgmma_in_e4m3_asynchronously_and_convert_and_spill_nothing(tile, tmp_path):
    kernel = compiled(tile, Int4E4M3Decoder(half=False, group_size=128), factor=True)
    loop = loop_instructions(disassembled(kernel, tmp_path))
    assert sum("QGMMA" in text for text in loop) >= 4
    assert not [text for text in loop if re.search(r"\b(I2F|F2F|F2FP|PRMT|LDL|STL|MEMBAR)\b", text)]
    assert "serialized" not in assembler_notes(kernel, tmp_path)
    assert tile.ctas_per_sm * (kernel.metadata.shared + 1024) <= 228 * 1024
    assert tile.ctas_per_sm * (tile.n // 16 + 4) * 32 * tile.registers <= 65536


@pytest.mark.parametrize(("group_size", "half"), exhaustive_but([(32, True), (64, False)], (32, True)))
def test_other_group_sizes_compile(group_size, half, tmp_path):
    for tile in (TILES[0], TILES[-1]):
        tile = e4m3_matmul.for_groups(tile, group_size)
        kernel = compiled(tile, Int4E4M3Decoder(half, group_size), factor=True, odd_rows=True)
        assert any("QGMMA" in text for text in disassembled(kernel, tmp_path))
        assert "serialized" not in assembler_notes(kernel, tmp_path)
