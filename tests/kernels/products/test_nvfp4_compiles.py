"""What the compiler makes of the Hopper kernels with NVFP4, with no GPU: few instructions, no spills."""

import re

import pytest

pytest.importorskip("triton")

from scalegate.kernels.hopper import invariant_config, stream_k_config
from scalegate.kernels.nvfp4.decoder import NVFP4Decoder
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.hopper_compiler import (
    assembler_notes,
    compiled,
    disassembled,
    loop_instructions,
    name_of,
)
from scalegate.tests.kernels.triton_versions import bound

DECODER = NVFP4Decoder(half=False)
INVARIANT = [tile for tiles in invariant_config.BUCKETS.values() for tile in tiles]
UNWANTED = re.compile(r"\b(I2F|I2FP|F2F|PRMT|LDL|STL)\b")
WEIGHTS_A_PRODUCT = 8
"""Of a thread: wgmma's operand of 64 rows and 16 columns, over 128 threads."""
MOST_INSTRUCTIONS = {8: 2.8, 16: 2.8, 32: 2.9}
"""Of the stream-K loop a weight, by rows of x; at an H200's bandwidth there is issue room for 3.9."""


@pytest.mark.parametrize(
    ("tile", "form"),
    exhaustive_but(
        [
            *((tile, {}) for tile in [*stream_k_config.TILES, *INVARIANT]),
            *((tile, {"sequential": True}) for tile in invariant_config.SEQUENTIAL_TILES),
            (stream_k_config.TILE_256X64, {"tails": True}),
        ],
        (stream_k_config.TILES[1], {}),
        (stream_k_config.TILE_128X128, {}),
        (INVARIANT[0], {}),
    ),
    ids=lambda form: "-".join(form) if isinstance(form, dict) else name_of(form),
)
def test_nvfp4_is_decoded_without_conversions_or_spills(tile, form, tmp_path):
    kernel = compiled(tile, DECODER, factor=True, odd_rows=True, **form)
    instructions = disassembled(kernel, tmp_path)
    products = [i for i, text in enumerate(instructions) if "HGMMA" in text]
    assert len(products) >= 4
    assert not [text for text in instructions[products[0] : products[-1]] if UNWANTED.search(text)]
    notes = assembler_notes(kernel, tmp_path)
    assert "0 bytes spill stores" in notes
    assert "serialized" not in notes


@pytest.mark.parametrize(
    "tile",
    exhaustive_but(stream_k_config.BUCKET_TILES[:3], stream_k_config.BUCKET_TILES[1]),
    ids=name_of,
)
def test_decoding_leaves_issue_slots_at_the_bandwidth_of_the_memory(tile, tmp_path):
    loop = loop_instructions(disassembled(compiled(tile, DECODER, factor=True), tmp_path))
    products = sum("HGMMA" in text for text in loop)
    assert products == 4 * tile.k_tiles * (2 if tile.k_tiles * 4 == tile.slices else 1)
    assert len(loop) <= MOST_INSTRUCTIONS[tile.m] * WEIGHTS_A_PRODUCT * products + bound(0, 0, 0, 4)
