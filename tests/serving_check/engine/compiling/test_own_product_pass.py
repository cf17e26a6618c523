"""The pass that gives an architecture's own products to our kernel where bits are kept."""

import pytest
import torch
from scalegate.serving_check.engine.compiling.graph_passes import options
from scalegate.serving_check.engine.compiling.own_product_pass import replace_products
from torch import Tensor, fx

from .test_top_k_pass import OnCuda, targets

aten = torch.ops.aten
ours = torch.ops.scalegate.own_product.default


def described(*shape: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    value = torch.empty(*shape, device="meta", dtype=dtype)
    return OnCuda(value) if device == "cuda" else value


def graph_of(product, *values: Tensor) -> fx.Graph:
    graph = fx.Graph()
    inputs = []
    for index, value in enumerate(values):
        inputs.append(graph.placeholder(f"x{index}"))
        inputs[-1].meta["val"] = value
    node = graph.call_function(product, tuple(inputs))
    node.meta["val"] = described(values[-2].shape[0], values[-1].shape[1])
    graph.output(node)
    return graph


def test_a_router_gets_our_product_and_its_bias_after_it():
    router = graph_of(aten.mm.default, described(5, 64), described(64, 8))
    replace_products(router)
    assert targets(router) == [ours]
    biased = graph_of(aten.addmm.default, described(8), described(5, 64), described(64, 8))
    replace_products(biased)
    assert targets(biased) == [ours, aten.add.Tensor]
    assert biased.find_nodes(op="output")[0].args[0].target == aten.add.Tensor


@pytest.mark.parametrize(
    "values",
    [
        (described(5, 64, device="cpu"), described(64, 8, device="cpu")),
        (described(5, 1), described(1, 8)),
        (described(5, 64, dtype=torch.float64), described(64, 8, dtype=torch.float64)),
    ],
    ids=["on a CPU", "of one column", "float64"],
)
def test_any_other_product_stays(values: tuple[Tensor, Tensor]):
    graph = graph_of(aten.mm.default, *values)
    replace_products(graph)
    assert targets(graph) == [aten.mm.default]


def test_where_bits_need_not_be_kept_a_router_stays_the_librarys():
    for mode, expected in (("tuned", aten.mm.default), ("pin", ours), ("per-token", ours)):
        graph = graph_of(aten.mm.default, described(5, 64), described(64, 8))
        (run,) = options(mode).values()
        run(graph)
        assert targets(graph) == [expected]
