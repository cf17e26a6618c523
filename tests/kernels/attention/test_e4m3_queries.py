"""Queries rounded to e4m3 keep their ratios within a head to four bits, whatever their size."""

import pytest
import torch
from scalegate.kernels.attention.e4m3_queries import e4m3_queries
from scalegate.tests.kernels.attention.rounded_queries import rounded_queries


@pytest.fixture
def queries() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 6, 5 * 3, dtype=torch.float32).view(5, 3, 1)
    return torch.randn(5, 3, 128, generator=generator) * sizes


def test_the_largest_of_each_head_becomes_the_largest_there_is(queries: torch.Tensor):
    codes, scale = e4m3_queries(queries)
    assert bool((codes.float().abs().amax(-1) == 448).all())
    assert torch.allclose(scale, queries.abs().amax(-1) / 448)


def test_an_error_is_a_sixteenth_of_a_number_or_a_small_part_of_the_largest(queries: torch.Tensor):
    error = (rounded_queries(queries) - queries).abs()
    bound = torch.maximum(queries.abs() / 16, queries.abs().amax(-1, keepdim=True) * 2**-10 / 448)
    assert bool((error <= bound * 1.001).all()) and float((error / bound).max()) > 0.8


def test_zeros_stay_zeros_and_belong_to_no_other_head(queries: torch.Tensor):
    queries[2, 1] = 0.0
    codes, _ = e4m3_queries(queries)
    assert not codes[2, 1].float().any() and not rounded_queries(queries)[2, 1].any()
    assert bool((codes.float().abs().amax(-1) == 448).sum() == 14)


@pytest.mark.parametrize("largest", [0.0, 1e-40, 1e-38, 1e-36, 1e-25])
def test_however_small_queries_are_their_codes_are_numbers_and_hidden_scores_stay_hidden(largest: float):
    """Hidden scores, minus infinity, are multiplied by the scale and by factors that may be small too."""
    codes, scale = e4m3_queries(torch.linspace(-largest, largest, 128).bfloat16().view(1, 1, 128))
    assert bool(codes.float().isfinite().all())
    factor = scale * 256**-0.5 * 1e-6
    assert bool((factor >= torch.finfo(torch.float32).tiny).all())
    assert bool((-torch.inf * factor == -torch.inf).all())
