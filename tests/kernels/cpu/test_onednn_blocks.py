"""Products by weights that are decoded into oneDNN's blocks."""

import pytest
import torch
from scalegate.kernels.cpu import onednn_blocks
from scalegate.kernels.cpu.coded_matmul import instructions_for
from scalegate.kernels.cpu.coded_tile import Instructions
from scalegate.layouts.formats.int4 import Int4, Int4Weight
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.cpu_tiles import CPU_TILES

CPU = torch.device("cpu")
FORMATS = [
    (Int4(64), 512),
    (Int4(128), 512),
    (NVFP4(), 192),
    (IQ2XXS(), 512),
    (Int8(32), 96),
    (Int8(128), 512),
]
N = 200

pytestmark = pytest.mark.skipif(
    instructions_for(torch.bfloat16) is not Instructions.BF16 or not torch.backends.mkldnn.is_available(),
    reason="needs AVX-512 with BF16, and oneDNN",
)


def test_the_blocks_of_this_onednn_are_known():
    """With blocks that are not, products would be right and prompts slow."""
    assert onednn_blocks.takes(512)


def product_of(weight):
    layout = next(layout for layout in CPU_TILES if isinstance(weight.spec, layout.format))
    packed, scales, group_size = layout.arrange(weight)
    return onednn_blocks.product_by(packed, weight.shape[1], group_size, layout.codes, scales)


@pytest.mark.parametrize("part_bytes", [onednn_blocks.PART_BYTES, 1], ids=["at once", "by blocks"])
@pytest.mark.parametrize("spec, k", FORMATS, ids=lambda value: getattr(value, "key", value))
def test_the_bits_are_those_of_the_dequantized_weight(spec, k, part_bytes, monkeypatch):
    """A decoded weight is `dequantize`'s, or the bfloat16 beside it, where float32 was rounded otherwise."""
    monkeypatch.setattr(onednn_blocks, "PART_BYTES", part_bytes)
    torch.manual_seed(11)
    weight = spec.random(N, k, CPU)
    decoded = product_of(weight)(torch.eye(k).bfloat16())[:, :N].T
    expected = weight.dequantize(torch.float32)
    assert ((decoded.float() - expected).abs() <= expected.abs() * 2**-8).all()
    assert (decoded == expected.bfloat16()).float().mean() > 0.999


def test_zero_points_in_float32_are_decoded():
    torch.manual_seed(12)
    weight = Int4(64).random(N, 512, CPU)
    weight = Int4Weight(weight.spec, weight.codes, (weight.scale.float() * 1.001).float(), weight.zero_point)
    decoded = product_of(weight)(torch.eye(512).bfloat16())[:, :N].T
    assert (decoded == weight.dequantize(torch.float32).bfloat16()).float().mean() > 0.999


def test_products_of_one_shape_share_their_room_and_not_their_results():
    torch.manual_seed(13)
    x = torch.randn(150, 512).bfloat16()
    products = [product_of(Int4(128).random(N, 512, CPU)) for _ in range(2)]
    first, second = (product(x) for product in products)
    assert not torch.equal(first, second)
    assert torch.equal(products[0](x), first) and torch.equal(products[1](x), second)


def test_a_k_that_onednn_fills_up_is_not_taken():
    assert onednn_blocks.takes(192) and not onednn_blocks.takes(176)
