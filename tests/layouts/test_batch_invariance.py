"""Layouts that claim to be batch-invariant are, at any number of rows, beside any rows and at any place."""

import pytest
import torch
from scalegate.base.batch_invariance import row_tiles
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.layouts.formats.weight_format import Weight
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import ExpertsLayout, Problem
from scalegate.tests.exhaustive import exhaustive_but
from torch import Tensor

CPU = torch.device("cpu")
N, K, ROWS = 320, 3072, 129


def test_where_a_row_tile_begins_does_not_depend_on_how_many_rows_there_are():
    assert [(tile.start, tile.stop) for tile in row_tiles(37, 16)] == [(0, 16), (16, 32), (32, 37)]
    for count in range(1, 100):
        tiles = list(row_tiles(count, 16))
        assert [row for tile in tiles for row in range(tile.start, tile.stop)] == list(range(count))
        assert all(tile.start % 16 == 0 for tile in tiles)


class FollowsTheRows:
    """As a library's product may: how many rows there are decides where a sum over K is cut in two."""

    def pack(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return weight.dequantize(dtype)

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        cut, x_wide, weight = len(x), x.float(), weight.float()
        y = x_wide[:, :cut] @ weight[:, :cut].T + x_wide[:, cut:] @ weight[:, cut:].T
        return y.to(x.dtype)


def drifts(layout, spec, dtype: torch.dtype) -> bool:
    """Whether a row's bits depend on how many come with it, or on its place."""
    torch.manual_seed(5)
    packed = layout.pack(spec.random(N, K, CPU), dtype)
    x = torch.randn(ROWS, K).to(dtype)
    together = layout.matmul(x, packed)
    alone = torch.cat([layout.matmul(row, packed) for row in x.split(1)])
    turned = layout.matmul(x.roll(5, 0).contiguous(), packed).roll(-5, 0)
    return not (torch.equal(alone, together) and torch.equal(turned, together))


@pytest.mark.parametrize("dtype", exhaustive_but([torch.float32, torch.bfloat16], torch.bfloat16), ids=str)
@pytest.mark.parametrize("spec", [Unquantized(), Int4(128), Int8(128), NVFP4()], ids=lambda spec: spec.name)
def test_every_layout_that_claims_it_keeps_a_rows_bits(spec, dtype: torch.dtype):
    def serving(mode: str) -> list[str]:
        problem = Problem(spec, N, K, dtype, CPU, batch_invariance=mode)  # type: ignore[arg-type]
        found = [name for name, layout in LAYOUTS.items() if layout.refuses(problem) is None]
        return [name for name in found if not isinstance(LAYOUTS[name], ExpertsLayout)]

    assert serving("pin") == serving("per-token") != []
    assert [name for name in serving("pin") if drifts(LAYOUTS[name], spec, dtype)] == []
    assert drifts(FollowsTheRows(), spec, dtype), "nothing was proved"
