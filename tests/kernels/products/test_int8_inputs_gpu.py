"""INT8 weights and inputs on the GPU: the right product, and a row's bits alone and among others."""

import pytest
import torch
from scalegate.kernels.fp8.round_rows import round_rows
from scalegate.layouts.formats.int8 import INT8_INPUTS, PER_TOKEN, WHOLE_ROW, Int8
from scalegate.layouts.packing.fp8_scaled import INT8_INPUTS as LAYOUT
from scalegate.layouts.packing.layout import Problem
from scalegate.tests.rounding_bounds import product_bound

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SPEC = Int8(WHOLE_ROW, INT8_INPUTS)
ROWS = (1, 7, 16, 31, 64, 65, 256, 257, 1000)


@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [(200, 2308, torch.bfloat16), (4096, 4096, torch.bfloat16), (4096, 12288, torch.float16)],
)
def test_the_product_is_right_and_its_bits_are_the_same_in_any_company(n: int, k: int, dtype: torch.dtype):
    assert LAYOUT.refuses(Problem(SPEC, n, k, dtype, CUDA)) is None
    weight = SPEC.random(n, k, CUDA)
    packed, exact = LAYOUT.pack(weight, dtype), weight.dequantize(torch.float64)
    first = None
    for m in ROWS:
        x = torch.randn(m, k, device=CUDA).to(dtype)
        x[0] = torch.linspace(-1, 1, k)
        codes, scales = round_rows(x, dtype=torch.int8)
        wanted_codes, wanted_scales = PER_TOKEN.codes(x)
        assert torch.equal(codes, wanted_codes) and torch.equal(scales.t(), wanted_scales)
        expected = (codes.double() * scales.t().double()) @ exact.T
        torch.full((m, n), float("nan"), device=CUDA, dtype=dtype)  # the answer's memory, poisoned
        y = LAYOUT.matmul(x, packed)
        assert (y.double() - expected).norm() <= product_bound(dtype, k) * expected.norm(), m
        first = y[0] if first is None else first
        assert torch.equal(y[0], first), m
