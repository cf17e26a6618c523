"""Grouped products on FP8 experts against float64, and the bits of a row among others; see conftest.py."""

import pytest
import torch
from scalegate.kernels.experts.fp8 import grouped_matmul
from scalegate.kernels.experts.routing import ExpertRouting, route_reference
from scalegate.kernels.experts.tile import Tile
from scalegate.layouts.formats.fp8 import BLOCKS, FP8, ROW, TENSOR
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import PackedWeight
from scalegate.tests.rounding_bounds import product_bound

from .test_decode_attention import DEVICE

EXPERTS, TOP_K = 4, 2
SMALL = Tile(n=64, k=128, stages=2, warps=4)


def routed(expert: torch.Tensor, block_rows: int, bucket: int = 0) -> ExpertRouting:
    blocks = route_reference(expert, EXPERTS, block_rows)
    return ExpertRouting(*(block.to(DEVICE) for block in blocks), expert.numel(), EXPERTS, bucket)


def packed(spec: FP8, n: int, k: int) -> tuple[PackedWeight, torch.Tensor]:
    """The layout's tensors, and the weights [E, N, K] in float64."""
    torch.manual_seed(n + k)
    weights = [spec.random(n, k, torch.device(DEVICE)) for _ in range(EXPERTS)]
    truth = torch.stack([weight.dequantize(torch.float64) for weight in weights])
    return LAYOUTS["grouped_fp8"].pack_experts(weights, torch.bfloat16), truth


def rounded(x: torch.Tensor, spec: FP8) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = spec.dynamic_input.codes(x)
    return codes.to(DEVICE), scales.t().contiguous().to(DEVICE)


@pytest.mark.parametrize(("by_token", "block_rows"), [(True, 8), (False, 8), (True, 128)])
@pytest.mark.parametrize(("scale", "k"), [(ROW, 256), (ROW, 192), (TENSOR, 256), (BLOCKS, 384)])
def test_products_agree_with_float64(scale: str, k: int, by_token: bool, block_rows: int) -> None:
    spec, n, tokens = FP8(scale), 72, 7 if block_rows == 8 else 90
    weight, truth = packed(spec, n, k)
    expert = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
    expert[:, 0] = expert[:, 0].clamp(max=1)  # so that an expert has several blocks, and others next to none
    x = torch.randn(tokens * (1 if by_token else TOP_K), k).to(torch.bfloat16)
    flat = expert.flatten().to(DEVICE)
    rows = spec.dynamic_input.round(x.float()).double().to(DEVICE)
    rows = rows.repeat_interleave(len(flat) // len(rows), 0)
    expected = torch.einsum("ak,ank->an", rows, truth[flat])
    codes, scales = weight.tensors["codes"], weight.tensors["scale"]
    y = grouped_matmul(*rounded(x, spec), codes, scales, routed(expert, block_rows), torch.bfloat16, SMALL)
    assert float((y.double() - expected).norm() / expected.norm()) < product_bound(torch.bfloat16, k)


def test_the_bits_of_a_row_depend_neither_on_its_block_nor_on_the_tile() -> None:
    weight, _ = packed(FP8(), 64, 256)
    codes, scales = weight.tensors["codes"], weight.tensors["scale"]
    x = torch.randn(40, 256).to(torch.bfloat16)
    expert = torch.rand(40, EXPERTS).topk(TOP_K).indices

    def product(tokens: int, block_rows: int, tile: Tile) -> torch.Tensor:
        inputs = rounded(x[:tokens], FP8())
        routing = routed(expert[:tokens], block_rows)
        return grouped_matmul(*inputs, codes, scales, routing, torch.bfloat16, tile)

    alone = product(1, 16, SMALL)
    for block_rows, tile in ((16, SMALL), (32, SMALL), (128, Tile(n=128, k=128, stages=2, warps=8))):
        assert torch.equal(alone, product(40, block_rows, tile)[:TOP_K]), (block_rows, tile)


def test_what_is_in_no_block_is_not_written_and_others_are_refused_by_name() -> None:
    weight, _ = packed(FP8(), 64, 128)
    expert = torch.tensor([[0, EXPERTS], [1, 2]])
    x = torch.randn(2, 128).to(torch.bfloat16)
    tensors = weight.tensors["codes"], weight.tensors["scale"]
    y = grouped_matmul(*rounded(x, FP8()), *tensors, routed(expert, 8), torch.bfloat16, SMALL)
    assert bool(y[[0, 2, 3]].isfinite().all()) and y.shape == (4, 64)
    with pytest.raises(TypeError, match="grouped_fp8 packs FP8Weight"):
        from scalegate.layouts.formats.int8 import Int8

        LAYOUTS["grouped_fp8"].pack_experts([Int8().random(64, 128, torch.device("cpu"))], torch.bfloat16)
