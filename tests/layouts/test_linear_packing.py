"""Unquantized linear layers get the fastest layout where another one than torch's is faster, and is right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from scalegate.layouts.choosing import linear_packing
from scalegate.layouts.choosing import measure as measure_module
from scalegate.layouts.choosing.linear_packing import pack_fastest
from scalegate.layouts.choosing.measure import measure
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.layouts.formats.weight_format import Weight
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import PackedWeight, Problem, Serves
from torch import Tensor, nn
from torch.nn import functional

TORCHS = "torch_linear"


@dataclass(frozen=True)
class DoubleLayout:
    """A layout that holds twice the weight, and multiplies by `factor` of it: 0.5 is right."""

    factor: float
    name: str = "doubled"
    kernel: str = "doubled"
    dtype: torch.dtype = torch.float64

    def refuses(self, problem: Problem) -> str | None:
        return Serves((Unquantized,), "cpu", (self.dtype,)).refuses(problem)

    def pack(self, weight: Weight, dtype: torch.dtype) -> PackedWeight:
        doubled = {"weight": 2 * weight.dequantize(dtype)}
        return PackedWeight(self.name, weight.spec, weight.shape, dtype, doubled)

    def matmul(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return functional.linear(x, packed.tensors["weight"]) * self.factor


class Model(nn.Module):
    """Two shapes, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def with_doubled(monkeypatch) -> Callable[[float, Mapping[int, float]], None]:
    """Registers `Doubled`, and says how much faster than torch's product it is measured, by the number of
    output features: no test depends on this machine's speed."""

    def register(factor: float, speeds: Mapping[int, float]) -> None:
        monkeypatch.setitem(LAYOUTS._entries, "doubled", DoubleLayout(factor))

        def times(calls, copies, device, budget):
            rows = calls[TORCHS](0).shape[-1]
            return {name: 100.0 / (1.0 if name == TORCHS else speeds[rows]) for name in calls}

        monkeypatch.setattr(linear_packing, "interleaved_microseconds", times)

    return register


def test_a_shape_for_which_another_layout_is_faster_gets_it_and_others_stay_torchs(with_doubled):
    with_doubled(0.5, {16: 1.5, 40: 0.9})
    model = Model().double()
    expected = model(torch.arange(5))
    assert list(pack_fastest(model).values()) == ["doubled"]
    assert [type(layer) for layer in model.layers] == [QuantizedLinear] * 2
    assert type(model.head) is nn.Linear
    torch.testing.assert_close(model(torch.arange(5)), expected)


def test_a_tied_embedding_stays_beside_the_packed_head(with_doubled):
    with_doubled(0.5, {16: 0.9, 40: 1.5})
    model = Model().double()
    expected = model(torch.arange(5))
    pack_fastest(model)
    assert type(model.head) is QuantizedLinear and type(model.layers[0]) is nn.Linear
    torch.testing.assert_close(model(torch.arange(5)), expected)


def test_a_layout_that_is_wrong_here_is_not_taken_however_fast(with_doubled):
    with_doubled(0.6, {16: 9.0, 40: 9.0})
    model = Model().double()
    assert pack_fastest(model) == {}
    assert all(type(layer) is nn.Linear for layer in (*model.layers, model.head))


def test_a_layout_that_fails_here_is_not_taken(with_doubled, monkeypatch):
    with_doubled(0.5, {16: 9.0, 40: 9.0})
    monkeypatch.setattr(DoubleLayout, "matmul", lambda self, x, packed: x @ x)
    assert pack_fastest(Model().double()) == {}


def test_a_layer_at_two_places_stays_one(with_doubled):
    with_doubled(0.5, {16: 1.5, 40: 0.9})
    model = Model().double()
    model.layers[1] = model.layers[0]
    pack_fastest(model)
    assert model.layers[1] is model.layers[0] and type(model.layers[0]) is QuantizedLinear


def test_where_torchs_product_is_the_only_one_nothing_is_timed(monkeypatch):
    monkeypatch.delattr(linear_packing, "interleaved_microseconds")
    assert pack_fastest(Model().double()) == {}


def test_quantized_layouts_are_compared_with_the_fastest_unquantized_one(monkeypatch):
    monkeypatch.setitem(LAYOUTS._entries, "doubled", DoubleLayout(0.5, dtype=torch.bfloat16))

    def times(calls, *others):
        return {name: 25.0 if name.endswith("doubled") else 100.0 for name in calls}

    monkeypatch.setattr(measure_module, "interleaved_microseconds", times)
    problem = Problem(Int4(32), 64, 64, torch.bfloat16, torch.device("cpu"))
    [measurement] = measure(problem, (1,), ["dequantize"]).measurements
    assert (measurement.microseconds, measurement.baseline_microseconds) == (100.0, 25.0)
