"""Linear layers that share an input become one product, and nothing else changes."""

import pytest
import torch
from scalegate.layouts.int4 import Int4Weight
from scalegate.layouts.layout import PackedWeight
from scalegate.layouts.swap_ab import SWAP_AB_PORTABLE
from scalegate.serving_check.engine.merged_projections import MergedLinear, merge_projections
from torch import Tensor, nn


class Block(nn.Module):
    """q and k share an input, so do gate and up, one of them in a module of its own; o has its own."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 12, bias), nn.Linear(8, 4, bias), nn.Linear(16, 8, bias)
        self.gate, self.inner = nn.Linear(8, 8, bias), nn.Sequential(nn.Linear(8, 8, bias))

    def forward(self, x: Tensor) -> Tensor:
        x = self.o(torch.cat([self.q(x), self.k(x)], dim=-1))
        return self.gate(x) * self.inner(x)


@pytest.mark.parametrize("bias", [False, True])
def test_projections_are_merged_and_outputs_are_the_same(bias: bool):
    model, x = Block(bias), torch.randn(2, 5, 8)
    expected = model(x)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert merge_projections(model, lambda: model(x)) == 1
    assert isinstance(model.q, MergedLinear) and isinstance(model.k, MergedLinear)
    assert not any(isinstance(module, MergedLinear) for module in (model.o, model.gate, model.inner[0]))
    torch.testing.assert_close(model(x), expected)
    assert torch.equal(model.k.weight, before["k.weight"])
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in before.values())


def test_a_layer_called_twice_is_left_alone():
    model, x = Block(), torch.randn(1, 1, 8)
    assert merge_projections(model, lambda: (model(x), model(x))) == 0


def test_projections_that_stop_sharing_an_input_say_so():
    model, x = Block(), torch.randn(1, 1, 8)
    merge_projections(model, lambda: model(x))
    model.q(x)
    with pytest.raises(RuntimeError, match="no longer"):
        model.k(x.clone())


def packed(n: int, k: int) -> PackedWeight:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale, zero = torch.rand(n, k // 32), torch.randint(0, 16, (n, k // 32), dtype=torch.uint8)
    weight = Int4Weight(codes, scale.to(torch.bfloat16), zero, 32)
    return SWAP_AB_PORTABLE.pack(weight, torch.bfloat16)


@pytest.mark.parametrize("rows, joins", [((128, 64, 40), True), ((128, 40, 64), False)])
def test_packed_weights_are_joined_where_tiles_allow(rows: tuple[int, ...], joins: bool):
    weights = [packed(n, 128) for n in rows]
    joint = SWAP_AB_PORTABLE.join(weights)
    assert (joint is not None) == joins
    if joint is not None:
        assert joint.shape == (sum(rows), 128)
        assert joint.nbytes == sum(weight.nbytes for weight in weights)
        assert torch.equal(joint.tensors["words"][2:3], weights[1].tensors["words"])
