"""Norms with a residual and rotary embedding on a CPU give the bits of transformers' modules."""

import numpy as np
import pytest
import torch
from scalegate.kernels.cpu.call_list import CallList
from scalegate.kernels.cpu.calls import Call, StepNumber
from scalegate.kernels.cpu.run_calls import run_calls
from scalegate.kernels.norms.gated_cpu import gated_call, serves, table_of
from scalegate.kernels.norms.rms_norm_cpu import NOTHING, norm_call, rms_norm
from scalegate.kernels.norms.rotate_heads_cpu import HeadNorm, Heads, rotate_call
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS, Q_HEADS, K_HEADS, POSITIONS, EPS = 3, 4, 2, 50, 1e-5

X, ADDED, OUT = range(len(StepNumber), len(StepNumber) + 3)


def step_numbers(rows: int = ROWS, **tensors: torch.Tensor) -> np.ndarray:
    step = np.zeros(OUT + 1, np.int64)
    step[StepNumber.ROWS] = rows
    places = {"x": X, "added": ADDED, "out": OUT}
    for name, tensor in tensors.items():
        step[places[name] if name in places else StepNumber[name.upper()]] = tensor.data_ptr()
    return step


def run_list(calls: list[Call], step: np.ndarray) -> None:
    in_memory = CallList(calls, step)
    run_calls()(in_memory.address, in_memory.count)


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
    norms = [HeadNorm(weight.data_ptr(), EPS) if has_norms else HeadNorm() for weight in weights]
    step = step_numbers(positions=positions, cos=cos, sin=sin, x=x)
    run_list([rotate_call(X, Heads(row, Q_HEADS, K_HEADS, dim), *norms, dtype)], step)
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


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_in_a_list_of_calls_gives_the_same_bits(dtype, is_added):
    torch.manual_seed(0)
    x, added, weight = (torch.randn(size).to(dtype) for size in ((ROWS, 96), (ROWS, 96), (96,)))
    again, expected, out = x.clone(), torch.empty_like(x), torch.empty_like(x)
    added_at = added.data_ptr() if is_added else 0
    rms_norm(dtype)(x.data_ptr(), added_at, weight.data_ptr(), expected.data_ptr(), ROWS, 96, EPS)
    step = step_numbers(x=again, added=added, out=out)
    run_list([norm_call(X, ADDED if is_added else NOTHING, weight, OUT, EPS)], step)
    assert torch.equal(out, expected) and torch.equal(again, x)


@pytest.mark.parametrize("activation", [functional.silu, functional.relu], ids=["silu", "relu"])
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_gates_are_those_of_torch(dtype, rows, activation):
    torch.manual_seed(0)
    gate_up = (torch.randn(rows, 2 * 192) * 4).to(dtype)
    gate, up = gate_up.chunk(2, dim=1)
    out, table = torch.empty(rows, 192, dtype=dtype), table_of(activation, dtype)
    run_list([gated_call(X, table, OUT, 192)], step_numbers(rows, x=gate_up, out=out))
    assert torch.equal(out, activation(gate) * up)


def test_an_activation_whose_bits_depend_on_how_numbers_lie_has_no_table():
    assert table_of(lambda x: x if x.is_contiguous() else x + 1, torch.bfloat16) is None


def test_only_rows_that_torch_computes_in_vectors_have_a_table():
    assert serves(torch.bfloat16, 192)
    assert not serves(torch.bfloat16, 96) and not serves(torch.float32, 192)
