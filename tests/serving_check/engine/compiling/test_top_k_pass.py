"""The pass that gives a router's top k to our kernel, and leaves every other top k alone."""

import pytest
import torch
from scalegate.serving_check.engine.compiling.graph_passes import options
from scalegate.serving_check.engine.compiling.top_k_pass import replace_top_k
from torch import fx


def graph_of(device: str, columns: int = 128, **settings) -> fx.Graph:
    """One top k of a [5, columns] tensor on a device; nothing is computed."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(5, columns, device="meta")
    if device == "cuda":
        x.meta["val"] = OnCuda(x.meta["val"])
    node = graph.call_function(torch.ops.aten.topk.default, (x, 8), settings)
    graph.output(node)
    return graph


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def targets(graph: fx.Graph) -> list:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_router_on_a_gpu_gets_our_kernel():
    graph = graph_of("cuda", dim=-1)
    replace_top_k(graph)
    assert targets(graph) == [torch.ops.scalegate.top_k.default]


@pytest.mark.parametrize(
    ("device", "columns", "settings"),
    [
        ("cpu", 128, {}),
        ("cuda", 4096, {}),
        ("cuda", 128, {"dim": 0}),
        ("cuda", 128, {"largest": False}),
    ],
    ids=["on a CPU", "long rows", "another dimension", "the smallest"],
)
def test_any_other_top_k_stays(device: str, columns: int, settings: dict):
    graph = graph_of(device, columns, **settings)
    replace_top_k(graph)
    assert targets(graph) == [torch.ops.aten.topk.default]


def test_compiled_code_is_kept_for_the_pass_as_it_is():
    (first,), (other,), (pinned,) = (options(mode).values() for mode in ("tuned", "tuned", "pin"))
    assert first.uuid() == other.uuid() != pinned.uuid() and first.uuid()
