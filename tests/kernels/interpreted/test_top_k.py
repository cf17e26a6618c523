"""The k largest of each row, against a stable sort; see conftest.py."""

import pytest
import torch
from scalegate.kernels.sampling.top_k import serves, top_k, top_k_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(x: torch.Tensor, k: int) -> None:
    values, columns = top_k(x.to(DEVICE), k)
    wanted, places = top_k_reference(x, k)
    assert torch.equal(values.cpu(), wanted) and torch.equal(columns.cpu(), places)


@pytest.mark.parametrize(("shape", "k"), [((3, 128), 8), ((1, 4), 4), ((2, 3, 60), 6), ((2, 256), 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values_and_columns_are_those_of_a_stable_sort(shape: tuple[int, ...], k: int, dtype: torch.dtype):
    check(torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(dtype), k)


def test_equal_values_come_in_the_order_of_their_columns():
    check(torch.tensor([[1.0, 3.0, 3.0, -2.0, 3.0, 1.0]]), 5)


def test_masked_entries_are_taken_once_each_and_last():
    x = torch.full((2, 16), -torch.inf)
    x[0, 5], x[1, 0] = -7.0, 0.0
    check(x, 4)


def test_what_the_kernel_has_no_room_for_is_left_to_torch():
    assert serves(1024, 32, torch.bfloat16)
    assert not serves(1025, 8, torch.float32) and not serves(64, 33, torch.float32)
    assert not serves(64, 8, torch.float64) and not serves(4, 5, torch.float32)
