"""RMSNorm and SiLU times up with their rounding to E4M3, against both apart; see conftest.py."""

import pytest
import torch
from scalegate.kernels.fp8.fused_rounding import (
    norm_and_round,
    norm_reference,
    silu_and_round,
    silu_reference,
)
from scalegate.kernels.fp8.round_rows import round_rows

from .test_decode_attention import DEVICE

ULPS = 2.0**-7
"""bf16 numbers that differ by one rounding."""


def assert_is_rounding_of(codes: torch.Tensor, scales: torch.Tensor, y: torch.Tensor) -> None:
    wanted, wanted_scales = round_rows(y)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("k", [128, 640, 5120])
@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_is_rounded_as_its_result_would_be(k: int, adds: bool):
    torch.manual_seed(k)
    x = torch.randn(3, k, device=DEVICE).mul(3).to(torch.bfloat16)
    x[1] = 0
    residual = torch.randn(3, k, device=DEVICE).to(torch.bfloat16) if adds else None
    weight = torch.rand(k, device=DEVICE).to(torch.bfloat16)
    h, y, codes, scales = norm_and_round(x, residual, weight, 1e-6, keeps=True)
    want_h, _ = norm_reference(x, residual, weight, 1e-6)
    if adds:  # The interpreter cuts bf16 off instead of rounding.
        torch.testing.assert_close(h, want_h, rtol=ULPS if DEVICE == "cpu" else 0, atol=0)
    else:
        assert h.numel() == 0
    _, want_y = norm_reference(h if adds else x, None, weight, 1e-6)
    torch.testing.assert_close(y, want_y, rtol=ULPS, atol=0)
    assert_is_rounding_of(codes, scales, y)
    _, none, same, _ = norm_and_round(x, residual, weight, 1e-6, keeps=False)
    assert none.numel() == 0
    assert torch.equal(same.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("k", [128, 640, 5120])
def test_silu_times_up_is_rounded_as_its_result_would_be(k: int):
    torch.manual_seed(k)
    gate_up = torch.randn(3, 2 * k, device=DEVICE).mul(3).to(torch.bfloat16)
    gate_up[1] = 0
    codes, scales = silu_and_round(gate_up)
    wanted, wanted_scales = round_rows(silu_reference(gate_up))
    torch.testing.assert_close(scales, wanted_scales, rtol=ULPS, atol=0)
    steps = (codes.view(torch.uint8).int() - wanted.view(torch.uint8).int()).abs()
    assert not steps[1].any()
    # The exponential is another one; and the interpreter carries nothing into E4M3's exponents.
    assert float((steps == 0).float().mean()) > 0.9
    assert float((steps <= 1).float().mean()) > (0.97 if DEVICE == "cpu" else 0.9999)
