"""A graph pass: replaces torch's top k in routers of experts by our kernel.

Inductor leaves `topk` to torch, whose two launches and a sort take a seventh of a layer's time when a single
request decodes. Calls that our kernel does not support stay as they are.
"""

import torch
from torch import Tensor, fx, library

from ....kernels.sampling.top_k import serves, top_k

aten = torch.ops.aten


@library.custom_op("scalegate::top_k", mutates_args=())
def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return top_k(x, k)


@_top_k.register_fake
def _(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def replace_top_k(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.topk.default):
        x, k, *rest = node.args
        settings = dict(zip(("dim", "largest", "sorted"), rest, strict=False)) | dict(node.kwargs)
        value = x.meta.get("val")
        if not isinstance(value, Tensor) or value.device.type != "cuda" or not isinstance(k, int):
            continue
        columns = value.shape[-1]
        wanted = settings.get("dim", -1) in (-1, value.ndim - 1) and settings.get("largest", True)
        if wanted and isinstance(columns, int) and serves(columns, k, value.dtype):
            node.target = torch.ops.scalegate.top_k.default
            node.args, node.kwargs = (x, k), {}
