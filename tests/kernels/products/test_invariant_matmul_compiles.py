"""Every tile of the batch-invariant product of a plain weight compiles, with no GPU."""

import pytest

pytest.importorskip("triton")

import triton
from scalegate.kernels.invariant_matmul import (
    DEEP_TILES,
    SPLIT_UNIT,
    TILES,
    Form,
    Tile,
    invariant_matmul_kernel,
)
from scalegate.tests.exhaustive import exhaustive_but
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
FORMS = [
    (tile, form)
    for tile in TILES + DEEP_TILES
    for form in ("whole", "split", "sequential")
    if form != "split" or tile.bm <= 128
]


@pytest.mark.parametrize(
    ("tile", "form"),
    exhaustive_but(FORMS, (TILES[0], "whole"), (TILES[0], "split"), (TILES[-1], "sequential")),
    ids=str,
)
def test_every_tile_compiles_to_the_matrix_units_instruction(tile: Tile, form: str):
    types = dict.fromkeys(["x_ptr", "weight_ptr", "y_ptr"], "*bf16")
    types |= {"partials": "*fp32", "semaphores": "*i32"}
    types |= dict.fromkeys(["M", "N", "K", "units", "tiles_m", "splits"], "i32")
    form_of_kernel = Form(
        split_k=form != "whole",
        sequential=form == "sequential",
        even=True,
        evict="",
        unit=SPLIT_UNIT,
        precision="tf32",
        bm=tile.bm,
        bn=tile.bn,
        bk=tile.bk,
        pdl=True,
    )
    constants = {"FORM": form_of_kernel}
    names = invariant_matmul_kernel.arg_names
    aligned = [name for name in names if str(types.get(name, ""))[:1] == "*"] + ["N", "K"]
    source = ASTSource(
        invariant_matmul_kernel,
        {name: "constexpr" if name in constants else types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    kernel = triton.compile(
        source, target=HOPPER, options={"num_warps": tile.warps, "num_stages": tile.stages}
    )
    assert f"wgmma.mma_async.sync.aligned.m64n{min(tile.bm, 256)}k16" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_MEMORY
