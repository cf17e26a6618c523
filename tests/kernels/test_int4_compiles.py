"""What the compiler makes of the INT4 kernels, with no GPU: wgmma, no conversions, no spills."""

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest
import triton
from scalegate.kernels.hopper import invariant, invariant_config, stream_k, stream_k_config, unpack
from scalegate.kernels.hopper.tile import Dequant
from scalegate.kernels.int4 import swap_ab
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INVARIANT = [tile for tiles in invariant_config.BUCKETS.values() for tile in tiles]
STREAM_K = list(stream_k_config.TILES)
STREAM_K_AND_TAILS = [*((tile, False) for tile in STREAM_K), (stream_k_config.TILE_256X64, True)]
SEQUENTIAL = list(invariant_config.SEQUENTIAL_TILES)
CONVERSION = re.compile(r"\b(I2F|I2FP|F2F|PRMT)\b")


def hopper_source(
    tile, group_size: int, fractional: bool, half: bool, odd_rows: bool, sequential: bool, tails: bool
) -> GluonASTSource:
    element = "fp16" if half else "bf16"
    dequant = Dequant(group_size, fractional, half)
    scale_rows = max(1, tile.k_tiles * 64 // group_size)
    x_layout, words_layout, scale_words_layout = (
        repr(layout()) for layout in (unpack.x_layout, unpack.words_layout, unpack.scale_words_layout)
    )
    is_invariant = isinstance(tile, invariant.Tile)
    bulk = is_invariant and tile.k_tiles == 1 and not odd_rows
    if is_invariant:
        kernel = invariant.int4_invariant_kernel
        constants = invariant.constants(tile, dequant, bulk, sequential)
    else:
        kernel = stream_k.int4_stream_k_kernel
        constants = stream_k.constants(tile, dequant, 1001 if odd_rows else 1024, tails)
    signature = dict.fromkeys(kernel.arg_names, "i32") | {
        "x_desc": f"tensordesc<{element}[{tile.m}, {tile.k_tiles * 64}],{x_layout}>",
        "words_desc": f"tensordesc<i32[{tile.n // 64}, {tile.k_tiles * 8}, 64],{words_layout}>",
        "scale_desc": f"tensordesc<i32[{scale_rows}, {tile.n}],{scale_words_layout}>",
        "y": f"*{element}",
        "partials": "*fp32",
        "semaphores": "*i32",
    }
    signature |= {name: "fp32" for name in kernel.arg_names if name.startswith("inv_")}
    if is_invariant:
        columns = tile.n if bulk else tile.k_tiles * 64
        signature["y_desc"] = f"tensordesc<{element}[{tile.m}, {columns}],{x_layout}>"
    signature |= dict.fromkeys(constants, "constexpr")
    places = {name: (kernel.arg_names.index(name),) for name in signature}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in ("y", "partials", "semaphores")}
    return GluonASTSource(kernel, signature, {places[n]: v for n, v in constants.items()}, aligned)


@functools.cache
def compiled(
    tile,
    group_size: int = 128,
    fractional: bool = False,
    half: bool = False,
    odd_rows: bool = False,
    sequential: bool = False,
    tails: bool = False,
):
    options = tile.options()
    source = hopper_source(tile, group_size, fractional, half, odd_rows, sequential, tails)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def disassembled(kernel, tmp_path: Path) -> list[str]:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    text = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True)
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", text.stdout)


def assembler_notes(kernel, tmp_path: Path) -> str:
    source = tmp_path / "kernel.ptx"
    source.write_text(kernel.asm["ptx"])
    command = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def name_of(tile) -> str:
    kernel = type(tile).__module__.rpartition(".")[2]
    return f"{kernel}-{tile.m}x{tile.n}-{tile.ctas_per_sm}"


def form_of(one) -> str:
    return ("tails" if one else "stream-k") if isinstance(one, bool) else name_of(one)


@pytest.mark.parametrize(
    ("tile", "form"),
    [
        *((tile, {}) for tile in INVARIANT + STREAM_K),
        *((tile, {"sequential": True}) for tile in SEQUENTIAL),
        (stream_k_config.TILE_256X64, {"tails": True}),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else name_of(one),
)
def test_hopper_tiles_use_wgmma_asynchronously_and_convert_and_spill_nothing(tile, form, tmp_path):
    kernel = compiled(tile, **form)
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


@pytest.mark.parametrize(("tile", "tails"), STREAM_K_AND_TAILS, ids=form_of)
def test_warps_do_not_wait_for_each_other_in_the_main_loop(tile, tails, tmp_path):
    instructions = disassembled(compiled(tile, tails=tails), tmp_path)
    products = [i for i, text in enumerate(instructions) if "HGMMA" in text]
    between = instructions[products[0] : products[-1]]
    assert not [text for text in between if text.startswith(("BAR", "MEMBAR"))]


@pytest.mark.parametrize(("tile", "tails"), STREAM_K_AND_TAILS, ids=form_of)
def test_the_ring_lies_where_the_ptx_looks_for_it(tile, tails):
    kernel = compiled(tile, tails=tails)
    others = [int(offset) for offset in re.findall(r"global_smem\+(\d+)", kernel.asm["ptx"])]
    # Whatever else the compiler keeps in shared memory comes behind, so the ring is at the start.
    assert others
    assert 0 < kernel.metadata.shared - min(others) < 1024


@pytest.mark.parametrize(
    ("tile", "tails"),
    [(INVARIANT[1], False), STREAM_K_AND_TAILS[0], *STREAM_K_AND_TAILS[-4:-2], STREAM_K_AND_TAILS[-1]],
    ids=form_of,
)
@pytest.mark.parametrize(
    ("group_size", "fractional", "half"), [(64, False, True), (32, True, False), (128, True, True)]
)
def test_every_form_of_the_weight_compiles_without_spills(
    tile, tails, group_size, fractional, half, tmp_path
):
    kernel = compiled(tile, group_size, fractional, half, odd_rows=True, tails=tails)
    notes = assembler_notes(kernel, tmp_path)
    assert "0 bytes spill stores" in notes
    assert "serialized" not in notes


@pytest.mark.parametrize(("capability", "product"), [(80, "HMMA"), (89, "HMMA"), (100, None)])
def test_the_portable_kernel_compiles_for_other_chips(capability, product, tmp_path):
    kernel = swap_ab.int4_swap_ab_kernel
    signature = dict.fromkeys(kernel.arg_names, "i32") | {
        "x": "*bf16",
        "words": "*i32",
        "scale_words": "*i32",
        "y": "*bf16",
    }
    constants = {"BM": 16, "GROUP": 128, "FRACTIONAL": False}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {name: (kernel.arg_names.index(name),) for name in signature}
    source = ASTSource(kernel, signature, {places[n]: v for n, v in constants.items()})
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    if product:
        assert any(product in text for text in disassembled(built, tmp_path))
