"""What the compiler makes of the Hopper kernels with two planes, with no GPU: no spills; x is read twice."""

import re

import pytest

pytest.importorskip("triton")

from scalegate.kernels.hopper import invariant_config, stream_k_config
from scalegate.kernels.int4 import planes
from scalegate.kernels.int4.decoder import Int4Decoder
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.hopper_compiler import assembler_notes, compiled, name_of

INVARIANT = [tile for tiles in invariant_config.BUCKETS.values() for tile in tiles]
TILES = [*stream_k_config.TILES, *INVARIANT]
WRAPPED = re.compile(r"%column\w* = arith\.subi \S+, %(x_desc_1|arg\d+) ")


@pytest.mark.parametrize(
    ("tile", "form"),
    exhaustive_but(
        [
            *((tile, {}) for tile in TILES),
            *((tile, {"sequential": True}) for tile in invariant_config.SEQUENTIAL_TILES),
            (stream_k_config.TILE_256X64, {"tails": True}),
        ],
        (TILES[0], {}),
        (stream_k_config.TILE_128X128, {}),
        (INVARIANT[0], {}),
    ),
    ids=lambda form: "-".join(form) if isinstance(form, dict) else name_of(form),
)
def test_both_planes_are_read_without_spills(tile, form, tmp_path):
    notes = assembler_notes(compiled(tile, planes.decoder(128, half=False), **form), tmp_path)
    assert "0 bytes spill stores" in notes
    assert "serialized" not in notes


@pytest.mark.parametrize("tile", [stream_k_config.TILES[0], INVARIANT[0]], ids=name_of)
def test_x_begins_again_at_the_second_plane_and_not_where_there_is_one(tile):
    def loads_begin_again(decoder: Int4Decoder) -> bool:
        return WRAPPED.search(compiled(tile, decoder).asm["ttgir"]) is not None

    assert loads_begin_again(planes.decoder(128, half=False))
    assert not loads_begin_again(Int4Decoder(half=False, group_size=128, fractional=False))
