"""The packed bytes of an IQ2_XXS weight, read by the kernel that dequantizes them, against the definition."""

import pytest
import torch
from scalegate.kernels.iq2_xxs.dequantize import dequantize
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.packing.iq2_xxs import IQ2_XXS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = ("words", "scales", "factor", "codebook")


@pytest.mark.parametrize(("n", "k"), [(16, 256), (70, 768)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_dequantizes_to_the_definition_but_for_the_rounding_of_scales(
    n: int, k: int, dtype: torch.dtype
):
    weight = IQ2XXS().random(n, k, DEVICE)
    tensors = dict(IQ2_XXS.pack(weight, dtype).tensors)
    assert (tensors["words"].numel() + tensors["scales"].numel()) * 4 == -(-n // 64) * 64 * k * 2.5 / 8
    found = dequantize(*(tensors[name] for name in NAMES), n, dtype)
    exact = weight.dequantize(torch.float32)
    assert torch.allclose(found.float(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
    tensors["words"][0, -1, 0] ^= 1 << 15
    changed = dequantize(*(tensors[name] for name in NAMES), n, dtype)
    assert (changed != found).sum() == 1
