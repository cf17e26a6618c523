"""What a test finds does not depend on which tests came before it."""

import pytest
import torch


@pytest.mark.parametrize("turn", ["first", "second"])
def test_every_test_draws_the_same_numbers(turn: str):
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
