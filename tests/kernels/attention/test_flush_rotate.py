"""The rotation of pages that are written on a GPU, line by line on torch's tensors: its layouts left out."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from scalegate.kernels.attention.kvarn import flush_rotate
from scalegate.kernels.hadamard import rotate_reference


@pytest.fixture(autouse=True)
def torch_in_the_place_of_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_layout(*_numbers: object) -> None: ...

    gl = SimpleNamespace(
        constexpr=None,
        float16=torch.float16,
        float32=torch.float32,
        num_warps=lambda: 8,
        static_range=range,
        SliceLayout=no_layout,
        DotOperandLayout=no_layout,
        arange=lambda start, end, _layout: torch.arange(start, end),
        full=lambda shape, value, dtype, _layout: torch.full(shape, value, dtype=dtype),
        convert_layout=lambda x, _layout, assert_trivial: x,
        split=lambda x: x.unbind(-1),
        join=lambda low, high: torch.stack([low, high], -1),
    )
    monkeypatch.setattr(flush_rotate, "gl", gl)
    monkeypatch.setattr(flush_rotate, "mma_v2", lambda a, b, sums: sums + a.float() @ b.float())
    monkeypatch.setattr(flush_rotate, "_accumulator", no_layout)
    monkeypatch.setattr(flush_rotate, "_signs", flush_rotate._signs.fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group_size, dim", [(64, 64), (128, 128), (32, 256)])
def test_rows_are_multiplied_by_a_hadamard_matrix(group_size: int, dim: int, dtype: torch.dtype):
    x = torch.randn(group_size, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = flush_rotate.rotate_rows.fn(x)
    held = x.half() if dtype == torch.float32 else x
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, rotate_reference(held).half(), rtol=1e-3, atol=1e-6)
