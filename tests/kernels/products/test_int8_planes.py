"""INT8 as two INT4 planes: the packed bytes stand for the weight."""

import pytest
import torch
from scalegate.kernels.int4 import packing, planes
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8, Int8Weight
from scalegate.layouts.packing.int8_swap_ab import INT8_SWAP_AB, PACKING
from scalegate.layouts.packing.layout import Problem
from scalegate.tests.rounding_bounds import rounded

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(64, 256, 128), (130, 768, 64), (200, 512, 32), (72, 256, WHOLE_ROW)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_the_reference_agrees_with_the_dequantized_weight(n, k, group_size, dtype):
    weight = Int8(group_size).random(n, k, torch.device("cpu"))
    tensors, attributes = PACKING.pack(weight, dtype)
    x = torch.randn(5, k).to(dtype)
    y = planes.reference_matmul(x, tensors["words"], tensors["scale_words"], n, attributes["group_size"])
    expected = x.double() @ weight.dequantize(torch.float64).T
    assert (y - expected).norm() < rounded(dtype) * expected.norm()  # of the scales


def test_every_code_is_exactly_the_sum_of_its_halves():
    codes = torch.arange(-128, 128).to(torch.int8).expand(64, 256).contiguous()
    weight = Int8Weight(Int8(64), codes, torch.full((64, 4), 2.0**-7, dtype=torch.bfloat16))
    words, scale_words = planes.pack(weight.codes, weight.scale, torch.bfloat16)
    halves = packing.reference_weight(words, scale_words, 64, False, torch.bfloat16).float()
    assert torch.equal(halves[:, :256] + halves[:, 256:], weight.dequantize(torch.float32))
    assert halves[:, :256].unique().numel() == halves[:, 256:].unique().numel() == 16


def test_it_takes_half_of_the_memory_of_bf16():
    tensors, _ = PACKING.pack(Int8().random(1024, 1024, torch.device("cpu")), torch.bfloat16)
    assert sum(tensor.nbytes for tensor in tensors.values()) < 0.55 * 2 * 1024 * 1024


def test_the_kernels_are_given_a_K_of_both_planes():
    weight = Int8().random(64, 512, torch.device("cpu"))
    operand = PACKING.operand(INT8_SWAP_AB.pack(weight, torch.bfloat16))
    assert operand.columns == 2 * 512 and operand.decoder.planes == 2


def test_a_stage_that_would_be_in_both_planes_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    served = Problem(Int8(128), 64, 512, torch.bfloat16, torch.device("cuda"))
    assert INT8_SWAP_AB.refuses(served) is None
    odd = Problem(Int8(128), 64, 384, torch.bfloat16, torch.device("cuda"))
    assert "multiple of 256, not 384" in (INT8_SWAP_AB.refuses(odd) or "")
