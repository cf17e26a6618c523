"""The packed bytes of an IQ2_XXS weight, read by the kernel that dequantizes them, against the definition."""

import pytest
import torch
from scalegate.kernels.iq2_xxs.dequantize import dequantize
from scalegate.kernels.iq2_xxs.grid import grid
from scalegate.kernels.iq2_xxs.packing import pack_scales, pack_words
from scalegate.layouts.formats.iq2_xxs import IQ2XXS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("n", "k"), [(16, 256), (37, 768)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernel_dequantizes_to_the_bits_of_the_definition(n: int, k: int, dtype: torch.dtype):
    weight = IQ2XXS().random(n, k, DEVICE)
    words = pack_words(weight.indices(), weight.sign_patterns(), weight.block_scales().flatten(1))
    assert words.numel() * 4 + pack_scales(weight.scale).numel() * 4 == -(-n // 16) * 16 * k * 2.0625 / 8
    found = dequantize(words, pack_scales(weight.scale), grid(DEVICE), n, dtype)
    assert torch.equal(found, weight.dequantize(dtype))
    words[-1, -1, 0, 1] ^= 1 << 28
    assert not torch.equal(dequantize(words, pack_scales(weight.scale), grid(DEVICE), n, dtype), found)
