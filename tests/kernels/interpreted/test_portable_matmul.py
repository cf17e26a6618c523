"""The portable packed product against float64; see conftest.py."""

import pytest
import torch
from scalegate.kernels.device import compute_capability, keeps_sums_in_registers
from scalegate.kernels.portable.packed_matmul import matmul
from scalegate.kernels.portable.tiles import STEP_COLUMNS, Tile, splits_of
from scalegate.layouts.formats.fp8 import BLOCKS, FP8, ROW, TENSOR
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.mxfp4 import MXFP4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.layouts.packing.portable import (
    FP8_PORTABLE,
    INT4_PORTABLE,
    INT8_PORTABLE,
    IQ2_XXS_PORTABLE,
    MXFP4_PORTABLE,
    NVFP4_PORTABLE,
    PortableLayout,
)
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.rounding_bounds import product_bound

from .test_decode_attention import DEVICE

TILES = {1: Tile(16, 64, 2, 4, 1), 2: Tile(16, 128, 2, 4, 2), 4: Tile(16, 64, 2, 4, 4)}
"""By the parts in which a tile is decoded."""
FORMS: list[tuple[PortableLayout, WeightFormat]] = [
    *((INT4_PORTABLE, Int4(group)) for group in (32, 64, 128, 256)),
    (INT4_PORTABLE, Int4(128, symmetric=True)),
    *((INT4_PORTABLE, Int4(group, zero_point="fractional")) for group in (32, 128)),
    (NVFP4_PORTABLE, NVFP4()),
    (INT8_PORTABLE, Int8(32)),
    (INT8_PORTABLE, Int8(WHOLE_ROW)),
    (IQ2_XXS_PORTABLE, IQ2XXS()),
    (MXFP4_PORTABLE, MXFP4()),
    *((FP8_PORTABLE, FP8(scale)) for scale in (ROW, TENSOR, BLOCKS)),
]
KEPT = FORMS[2], FORMS[5], FORMS[7], *FORMS[9:13], FORMS[14]


def dtype_of(layout: PortableLayout) -> torch.dtype:
    """Of activations: fp16 where it is served, since the interpreter multiplies no bf16."""
    interpreted = DEVICE == "cpu"
    return torch.float16 if interpreted or torch.float16 in layout.packing.dtypes else torch.bfloat16


def operand_and_truth(layout: PortableLayout, spec: WeightFormat, n: int, k: int):
    torch.manual_seed(n + k)
    weight = spec.random(n, k, DEVICE)
    operand = layout.operand(layout.pack(weight, dtype_of(layout)))
    return operand, weight.dequantize(torch.float64)


@pytest.mark.parametrize(
    ("m", "layout", "spec"),
    exhaustive_but(
        ((m, *form) for m in (1, 17) for form in FORMS),
        (1, *KEPT[0]),
        *((17, *form) for form in KEPT),
    ),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_format_agrees_with_float64(m: int, layout: PortableLayout, spec: WeightFormat):
    n, k = 60, 2048
    operand, truth = operand_and_truth(layout, spec, n, k)
    assert splits_of(n, k // STEP_COLUMNS) > 1
    dtype = dtype_of(layout)
    x = torch.randn(m, k).to(DEVICE, dtype)
    want = x.double() @ truth.T
    for _ in range(2 if m == 1 else 1):  # the second time shows that the first left no trace
        y = matmul(x, operand, n, TILES[1 if m == 1 else 4])
        assert float((y.double() - want).norm() / want.norm()) < product_bound(dtype, k)
        assert not operand.semaphores.any()


def test_a_ragged_k_reads_no_column_of_its_neighbours():
    n, k = 64, 192
    operand, truth = operand_and_truth(INT4_PORTABLE, Int4(64), n, k)
    x = torch.randn(3, k).to(DEVICE, torch.float16)
    want = x.double() @ truth.T
    y = matmul(x, operand, n, TILES[2])
    assert float((y.double() - want).norm() / want.norm()) < product_bound(torch.float16, k)


def test_the_bits_of_a_row_depend_neither_on_the_rows_beside_it_nor_on_the_tile():
    """260 rows are summed by one CTA a tile, fewer by one for each split.

    Nor by the parts of a tile, on a GPU with one matrix instruction; the interpreter adds as NumPy likes.
    """
    n, k = 64, 2048
    operand, _ = operand_and_truth(INT4_PORTABLE, Int4(128), n, k)
    x = torch.randn(260, k).to(DEVICE, torch.float16)
    alone = matmul(x[:1], operand, n, TILES[1])
    tiles = {20: Tile(16, 128, 2, 4, 1), 260: Tile(128, 64, 2, 4, 1)}
    if DEVICE == "cuda" and keeps_sums_in_registers(compute_capability(torch.device(DEVICE))):
        tiles |= dict.fromkeys((7, 16, 31, 64, 256, 260))  # the table's
    for rows, tile in tiles.items():
        assert torch.equal(alone, matmul(x[:rows], operand, n, tile)[:1]), rows
    changed = matmul(x[:1] * 1.01, operand, n, TILES[1])
    assert not torch.equal(alone, changed)


def test_a_weight_of_other_columns_is_refused():
    operand, _ = operand_and_truth(INT4_PORTABLE, Int4(128), 64, 256)
    with pytest.raises(ValueError, match="x has 512 columns"):
        matmul(torch.zeros(1, 512, dtype=torch.float16), operand, 64)
