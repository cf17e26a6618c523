"""Norms with a residual and rotary embedding on a CPU give the bits of transformers' modules."""

import pytest
import torch
from scalegate.kernels.norms.rms_norm_cpu import rms_norm
from scalegate.kernels.norms.rotate_heads_cpu import rotate_heads
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS, Q_HEADS, K_HEADS, POSITIONS, EPS = 3, 4, 2, 50, 1e-5


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By the kernel, whose sums have another order than torch's."""
    out, rows = torch.empty_like(x), x.numel() // len(weight)
    rms_norm(x.dtype)(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), rows, len(weight), EPS)
    return out


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dim", [32, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_normed_and_rotated_as_by_transformers(dtype, dim, has_norms):
    torch.manual_seed(0)
    row = (Q_HEADS + 2 * K_HEADS) * dim
    x = torch.randn(ROWS, row).to(dtype)
    weights = [torch.randn(dim).to(dtype) for _ in "qk"]
    positions = torch.tensor([7, 0, POSITIONS - 1])
    angles = torch.randn(POSITIONS, dim)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    heads = x.view(ROWS, -1, dim)
    query, key = (
        heads[:, :Q_HEADS].contiguous(),
        heads[:, Q_HEADS : Q_HEADS + K_HEADS].contiguous(),
    )
    if has_norms:
        query, key = normed(query, weights[0]), normed(key, weights[1])
    expected = apply_rotary_pos_emb(query, key, cos[positions], sin[positions])
    values = heads[:, Q_HEADS + K_HEADS :].clone()
    rotate_heads(dtype)(
        *(x.data_ptr(), row, ROWS, Q_HEADS, K_HEADS, dim),
        *(weight.data_ptr() if has_norms else 0 for weight in weights),
        *(cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), EPS, EPS),
    )
    assert torch.equal(heads[:, : Q_HEADS + K_HEADS], torch.cat(expected, dim=1))
    assert torch.equal(heads[:, Q_HEADS + K_HEADS :], values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_is_added_before_the_norm(dtype):
    torch.manual_seed(0)
    x, added = torch.randn(ROWS, 96).to(dtype), torch.randn(ROWS, 96).to(dtype)
    norm = LlamaRMSNorm(96, eps=EPS).to(dtype)
    torch.nn.init.normal_(norm.weight)
    weight, total, out = norm.weight.detach(), x + added, torch.empty_like(x)
    rms_norm(dtype)(x.data_ptr(), added.data_ptr(), weight.data_ptr(), out.data_ptr(), ROWS, 96, EPS)
    assert torch.equal(x, total) and torch.equal(out, normed(total, weight))
    # Sums in another order: half a last bit of each of three roundings, and of fp32's.
    bound = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 8)
    torch.testing.assert_close(out, norm(total).detach(), rtol=bound, atol=0.0)
