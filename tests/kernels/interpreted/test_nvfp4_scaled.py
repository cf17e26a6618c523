"""NVFP4 times NVFP4 and the rounding of its inputs, against their definitions; see conftest.py.

Blackwell's instruction is not run: the kernel decodes both operands instead (`native=False`).
"""

import pytest
import torch
from scalegate.kernels.nvfp4.scaled_matmul import ScaledTile, round_to_nvfp4, scaled_matmul
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Input, NVFP4Weight
from scalegate.tests.rounding_bounds import product_bound

from .test_decode_attention import DEVICE

TILE = ScaledTile(bm=16, bn=32, bk=64)


def input_format(divides: bool) -> NVFP4Input:
    scale = torch.tensor(2.0**-9 if not divides else 2.0**9, device=DEVICE)
    return NVFP4Input(scale, divides)


def values(codes: torch.Tensor, scales: torch.Tensor, of: NVFP4Input) -> torch.Tensor:
    """What codes and scales stand for, fp32 [M, K]."""
    scale = 1 / of.global_scale if of.divides else of.global_scale
    return NVFP4Weight(NVFP4(), codes, scales, scale).dequantize(torch.float32)


@pytest.mark.parametrize("divides", [False, True])
def test_inputs_are_rounded_to_the_values_of_the_definition(divides: bool):
    """All of them on a GPU. The interpreter's cast to E4M3 is not exact (`test_fp8.py`)."""
    x = torch.randn(5, 320).to(DEVICE, torch.float16)
    x[1, :16], x[2, 16:32] = 0, 1e-6
    definition = input_format(divides)
    got = values(*round_to_nvfp4(x, definition.global_scale, divides), definition)
    wanted = definition.round(x.float() if not divides else x).float()
    close = (got - wanted).abs() <= wanted.abs() * (0 if DEVICE == "cuda" and not divides else 1e-3)
    assert float(close.float().mean()) >= (1.0 if DEVICE == "cuda" else 0.85)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 320), (17, 64, 128)])
def test_the_product_agrees_with_float64(m: int, n: int, k: int):
    torch.manual_seed(m)
    of_x, weight = input_format(False), NVFP4().random(n, k, torch.device(DEVICE))
    x = torch.randn(m, k).to(DEVICE, torch.float16)
    codes, scales = round_to_nvfp4(x, of_x.global_scale, of_x.divides)
    factor = (weight.global_scale * of_x.global_scale).reshape(1)
    y = scaled_matmul(codes, scales, weight.codes, weight.scale, factor, x.dtype, native=False, tile=TILE)
    want = values(codes, scales, of_x).double() @ weight.dequantize(torch.float64).T
    assert float((y.double() - want).norm() / want.norm()) < product_bound(torch.float16, k)
