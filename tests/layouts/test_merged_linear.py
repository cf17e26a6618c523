"""Linear layers that share an input become one product, and nothing else changes."""

from collections.abc import Callable

import pytest
import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import Weight, WeightFormat, merge_rows
from scalegate.layouts.modules.linear import QuantizedLinear, packed_layers
from scalegate.layouts.modules.merged_linear import (
    MergedLinear,
    layers_of,
    layers_with_one_input,
    merge_unquantized,
    merged_name,
    put_merged,
)
from scalegate.layouts.packing.all_layouts import LAYOUTS
from torch import Tensor, nn

CPU = torch.device("cpu")


class Block(nn.Module):
    """q and k share an input, so do gate and up, one of them in a module of its own; o has its own."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 12, bias), nn.Linear(8, 4, bias), nn.Linear(16, 8, bias)
        self.gate, self.inner = nn.Linear(8, 8, bias), nn.Sequential(nn.Linear(8, 8, bias))

    def forward(self, x: Tensor) -> Tensor:
        x = self.o(torch.cat([self.q(x), self.k(x)], dim=-1))
        return self.gate(x) * self.inner(x)


def merge(model: nn.Module, x: Tensor) -> int:
    return merge_unquantized(model, layers_with_one_input(model, lambda: model(x)))


@pytest.mark.parametrize("bias", [False, True])
def test_layers_with_one_input_are_merged_and_outputs_are_the_same(bias: bool):
    model, x = Block(bias), torch.randn(2, 5, 8)
    expected = model(x)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert layers_with_one_input(model, lambda: model(x)) == [["q", "k"]]
    assert merge(model, x) == 1
    assert isinstance(model.q, MergedLinear) and isinstance(model.k, MergedLinear)
    assert model.q.merged is model.k.merged
    assert not any(isinstance(module, MergedLinear) for module in (model.o, model.gate, model.inner[0]))
    torch.testing.assert_close(model(x), expected)
    assert torch.equal(model.k.weight, before["k.weight"])
    assert (model.k.bias is None) if not bias else torch.equal(model.k.bias, before["k.bias"])
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in before.values())


def test_who_shares_an_input_is_found_without_data():
    with torch.device("meta"):
        model = Block()
    assert layers_with_one_input(model, lambda: model(torch.empty(1, 2, 8, device="meta"))) == [["q", "k"]]
    assert not any(module._forward_pre_hooks for module in model.modules()), "left as it was"


def test_a_layer_called_twice_is_left_alone():
    model, x = Block(), torch.randn(1, 1, 8)
    assert layers_with_one_input(model, lambda: (model(x), model(x))) == []


def hooked(model: Block) -> None:
    model.k.register_forward_hook(lambda module, args, output: output + 1)


def subclassed(model: Block) -> None:
    class DoubleLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.k = DoubleLinear(8, 4, bias=False)


@pytest.mark.parametrize("change", [hooked, subclassed], ids=lambda change: change.__name__)
def test_a_layer_that_does_more_than_a_product_is_left_alone(change: Callable[[Block], None]):
    model, x = Block(), torch.randn(1, 1, 8)
    change(model)
    expected = model(x)
    assert merge(model, x) == 0
    assert torch.equal(model(x), expected)


def bias_for_one(model: Block) -> None:
    model.k.bias = nn.Parameter(torch.ones(4))


def other_dtype(model: Block) -> None:
    model.k.weight = nn.Parameter(model.k.weight.double())


@pytest.mark.parametrize("change", [bias_for_one, other_dtype], ids=lambda change: change.__name__)
def test_layers_that_do_not_fit_together_are_left_alone(change: Callable[[Block], None]):
    model = Block()
    change(model)
    assert merge_unquantized(model, [["q", "k"]]) == 0
    assert type(model.q) is nn.Linear and type(model.k) is nn.Linear


def test_layers_that_stop_sharing_say_so():
    model, x = Block(), torch.randn(1, 1, 8)
    merge(model, x)
    model.q(x)
    with pytest.raises(RuntimeError, match="no longer"):
        model.k(x.clone())
    other = Block()
    merge(other, x)
    with pytest.raises(RuntimeError, match="no longer"):
        other.k(x)


def test_an_output_is_not_held_longer_than_it_is_needed():
    model, x = Block(), torch.randn(1, 1, 8)
    merge(model, x)
    model(x)
    assert model.q.product.output is None and model.q.product.input is None


@pytest.mark.parametrize("spec", [Int4(32), Int4(32, zero_point="fractional"), NVFP4()], ids=str)
@pytest.mark.parametrize("rows", [(128, 64, 40), (128, 40, 64), (7,), (1, 2)])
def test_packed_weights_are_merged_before_packing_whatever_their_rows(
    spec: WeightFormat, rows: tuple[int, ...]
):
    """A tile of a layout may hold rows of two layers: nothing is joined that was packed."""
    whole = spec.random(sum(rows), 128, CPU)
    names = [f"part{index}" for index in range(len(rows))]
    weights, start = [], 0
    for n in rows:
        weights.append(whole.rows(start, start + n))
        start += n
    model = nn.Module()
    for name, n in zip(names, rows, strict=True):
        model.add_module(name, nn.Linear(128, n, bias=False))
    put_merged(model, names, packed_linear(merge_rows(weights)))
    x = torch.randn(3, 5, 128, dtype=torch.bfloat16)
    for name, weight in zip(names, weights, strict=True):
        y = model.get_submodule(name)(x)
        assert y.shape == (3, 5, weight.shape[0])
        torch.testing.assert_close(y, packed_linear(weight)(x), rtol=2e-2, atol=2e-3)
    assert packed_layers(model) == {f"dequantize {sum(rows)}x128": 1}, "held and counted once"


def packed_linear(weight: Weight) -> QuantizedLinear:
    return QuantizedLinear(LAYOUTS["dequantize"].pack(weight, torch.bfloat16), None)


def test_a_merged_packed_layer_has_no_rows_to_show():
    model = Block()
    put_merged(model, ["q", "k"], packed_linear(Int4(16).random(16, 16, CPU)))
    assert (model.q.in_features, model.q.out_features, model.k.out_features) == (16, 12, 4)
    assert not hasattr(model.q, "weight") and model.q.bias is None


def test_merged_layers_are_called_by_all_their_names():
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    assert merged_name(names) == "model.layers.0.self_attn.q_proj+k_proj+v_proj"
    assert merged_name(names[:1]) == names[0] and merged_name(["q", "k"]) == "q+k"
    assert [layers_of(merged_name(names[:count])) for count in (1, 2, 3)] == [1, 2, 3]
