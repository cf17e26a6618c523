"""What the compiler makes of the INT4 kernels, with no GPU: wgmma, no conversions, no spills."""

import re

import pytest

pytest.importorskip("triton")

from scalegate.kernels.hopper import invariant_config, stream_k_config
from scalegate.kernels.int4.decoder import Int4Decoder
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.hopper_compiler import assembler_notes, compiled, disassembled, name_of
from scalegate.tests.kernels.triton_versions import bound

INVARIANT = [tile for tiles in invariant_config.BUCKETS.values() for tile in tiles]
STREAM_K = list(stream_k_config.TILES)
STREAM_K_AND_TAILS = [*((tile, False) for tile in STREAM_K), (stream_k_config.TILE_256X64, True)]
SEQUENTIAL = list(invariant_config.SEQUENTIAL_TILES)
FORMS = [(32, True, False), (64, False, True), (128, True, True)]
"""(group size, fractional zero points, float16): every branch of the decoder."""
CONVERSION = re.compile(r"\b(I2F|I2FP|F2F|PRMT)\b")


def int4(group_size: int = 128, fractional: bool = False, half: bool = False) -> Int4Decoder:
    return Int4Decoder(half, group_size, fractional)


def form_of(value) -> str:
    return ("tails" if value else "stream-k") if isinstance(value, bool) else name_of(value)


EVERY_STREAM_K = pytest.mark.parametrize(
    ("tile", "tails"),
    exhaustive_but(STREAM_K_AND_TAILS, (STREAM_K[1], False), (stream_k_config.TILE_128X128, False)),
    ids=form_of,
)


@pytest.mark.parametrize(
    ("tile", "form"),
    exhaustive_but(
        [
            *((tile, {}) for tile in INVARIANT + STREAM_K),
            *((tile, {"sequential": True}) for tile in SEQUENTIAL),
            (stream_k_config.TILE_256X64, {"tails": True}),
        ],
        (STREAM_K[1], {}),
        (stream_k_config.TILE_128X128, {}),
        (SEQUENTIAL[0], {"sequential": True}),
    ),
    ids=lambda form: "-".join(form) if isinstance(form, dict) else name_of(form),
)
def test_hopper_tiles_use_wgmma_asynchronously_and_convert_and_spill_nothing(tile, form, tmp_path):
    kernel = compiled(tile, int4(), **form)
    instructions = disassembled(kernel, tmp_path)
    products = [i for i, text in enumerate(instructions) if "HGMMA" in text]
    assert len(products) >= 4
    between = instructions[products[0] : products[-1]]
    assert not [text for text in between if CONVERSION.search(text)]
    assert not [text for text in between if re.search(r"\b(LDL|STL)\b", text)]
    notes = assembler_notes(kernel, tmp_path)
    assert "0 bytes spill stores" in notes
    assert "serialized" not in notes
    # What an SM holds: 227 KB of shared memory less 1 KB for each CTA, 64 Ki registers.
    assert tile.ctas_per_sm * (kernel.metadata.shared + 1024) <= 228 * 1024
    assert tile.ctas_per_sm * (tile.n // 16 + 4) * 32 * tile.registers <= 65536


@EVERY_STREAM_K
def test_warps_do_not_wait_for_each_other_in_the_main_loop(tile, tails, tmp_path):
    instructions = disassembled(compiled(tile, int4(), tails=tails), tmp_path)
    products = [i for i, text in enumerate(instructions) if "HGMMA" in text]
    between = instructions[products[0] : products[-1]]
    assert not [text for text in between if text.startswith("MEMBAR")]
    # 3.9 lets the two warpgroups of tiles of 128 rows of the weight meet behind their wgmmas.
    met = [text for text in between if text.startswith("BAR")]
    assert len(met) <= (bound(0, 0, 0, 8) if tile.n == 128 else 0)


@EVERY_STREAM_K
def test_the_ring_lies_where_the_ptx_looks_for_it(tile, tails):
    kernel = compiled(tile, int4(), tails=tails)
    others = [int(offset) for offset in re.findall(r"global_smem\+(\d+)", kernel.asm["ptx"])]
    # Whatever else the compiler keeps in shared memory comes behind, so the ring is at the start.
    assert others
    assert 0 < kernel.metadata.shared - min(others) < 1024


@pytest.mark.parametrize(
    ("tile", "tails", "group_size", "fractional", "half"),
    exhaustive_but(
        [
            # Every form in the tile of most registers, which spills first; that of most scales in the others.
            *((stream_k_config.TILE_256X64, True, *form) for form in FORMS),
            *(
                (*tile, *FORMS[0])
                for tile in [(INVARIANT[1], False), STREAM_K_AND_TAILS[0], *STREAM_K_AND_TAILS[-4:-2]]
            ),
        ],
        (stream_k_config.TILE_256X64, True, *FORMS[0]),
    ),
    ids=lambda value: name_of(value) if hasattr(value, "ctas_per_sm") else None,
)
def test_every_form_of_the_weight_compiles_without_spills(
    tile, tails, group_size, fractional, half, tmp_path
):
    kernel = compiled(tile, int4(group_size, fractional, half), odd_rows=True, tails=tails)
    notes = assembler_notes(kernel, tmp_path)
    assert "0 bytes spill stores" in notes
    assert "serialized" not in notes
