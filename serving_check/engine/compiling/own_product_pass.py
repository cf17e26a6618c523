"""A graph pass for batch-invariant serving: replaces an architecture's own products by our kernel.

Routers of experts multiply by their own parameter, which no layout packs, and a GPU's libraries choose an
algorithm by the number of rows. Linear layers and experts are left alone, since their layouts are
batch-invariant.
"""

import functools

import torch
from torch import Tensor, fx, library

from ....kernels.invariant_matmul import invariant_matmul, semaphores_of
from ....layouts.packing.invariant_linear import DTYPES

aten = torch.ops.aten
WEIGHT_AT = {aten.linear: 1, aten.mm: 1, aten.addmm: 2}
"""The index of the weight among the arguments of each product that this pass supports."""


def serves(product: object, weight: object) -> bool:
    """Say whether this pass replaces the product: by a weight [N, K] or its transpose, on a GPU."""
    return (
        product in WEIGHT_AT
        and isinstance(weight, Tensor)
        and weight.ndim == 2
        and weight.device.type == "cuda"
        and weight.dtype in DTYPES
    )


def replace_products(graph: fx.Graph) -> None:
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, x, weight = node.args
            value = weight.meta.get("val")
            if not serves(target.overloadpacket, value) or value.shape[0] == 1:
                continue  # K = 1: nothing is summed
            with graph.inserting_before(node):
                product = graph.call_function(torch.ops.scalegate.own_product.default, (x, weight))
                product.meta["val"] = node.meta["val"]
                if bias:
                    product = graph.call_function(aten.add.Tensor, (product, bias[0]))
                    product.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(product)
            graph.erase_node(node)


@library.custom_op("scalegate::own_product", mutates_args=())
def _own_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [M, K] by weight [K, N] to [M, N]; the weight is the transposed view of a contiguous one."""
    rows = weight.t().contiguous()
    return invariant_matmul(x.contiguous(), rows, _semaphores(len(rows), x.device))


@_own_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@functools.cache
def _semaphores(n: int, device: torch.device) -> Tensor:
    """Return semaphores for all weights of n rows. Products run in order, and each leaves the semaphores at
    zero.
    """
    return torch.zeros(semaphores_of(n), dtype=torch.int32, device=device)
