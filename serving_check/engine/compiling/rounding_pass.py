"""A graph pass for FP8: products' inputs are rounded to E4M3 in the kernel that makes them.

A product whose inputs are rounded token by token (`RoundedRowsLayout`) otherwise reads what a norm or SiLU
times up has written, to round it. The pass finds RMSNorm, with the addition before it if there is one, and
SiLU times up of a merged product's halves; what else a product takes, it rounds itself as before.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg

from ....kernels.fp8.fused_rounding import MOST_COLUMNS
from ....layouts.modules import rounded_inputs

aten, prims, scalegate = torch.ops.aten, torch.ops.prims, torch.ops.scalegate
VIEWS = (aten.reshape.default, aten.view.default)
DEVICE = "cuda"
ROUNDED_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Norm:
    """`y = h * rsqrt(mean(h * h) + eps) * weight`.

    node: the last multiplication, y
    h:    what is normed; `added` are its parts if it is a sum that the kernel can add
    """

    node: fx.Node
    h: fx.Node
    added: tuple[fx.Node, fx.Node] | None
    weight: fx.Node
    eps: float


def round_in_place(graph: fx.Graph) -> None:
    """Replace products and what makes their inputs, throughout the graph."""
    rounded: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in [*graph.nodes]:
        if not _takes_codes(node):
            continue
        source = _unviewed(node.args[0])
        if source not in rounded:
            codes = _codes_of(graph, source)
            if codes is None:
                continue
            rounded[source] = codes
        _use(graph, node, *rounded[source])
    for node in graph.find_nodes(op="call_function", target=scalegate.also_rounded.default):
        node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def _use(graph: fx.Graph, node: fx.Node, codes: fx.Node, scales: fx.Node) -> None:
    """Let a product take the codes, or those who take codes from a rounding apart."""
    if node.target == scalegate.round_rows.default:
        users: list[Any] = [*node.users]
        for user in users:
            user.replace_all_uses_with((codes, scales)[user.args[1]])
        return
    dtype = node.meta["val"].dtype
    with graph.inserting_before(node):
        args = (codes, scales, dtype, *node.args[1:])
        product = graph.call_function(scalegate.packed_matmul_rounded.default, args)
    product.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(product)


def _codes_of(graph: fx.Graph, source: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return codes and scales of what a node makes, from a kernel that makes and rounds it at once."""
    if source.target == scalegate.also_rounded.default:
        return source.args[1], source.args[2]
    value = source.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != DEVICE or value.dtype not in ROUNDED_DTYPES:
        return None
    if not isinstance(value.shape[-1], int) or value.shape[-1] > MOST_COLUMNS:
        return None
    gate_up = _silu_of(source)
    if gate_up is not None:
        with graph.inserting_before(source):
            fused = _call(graph, scalegate.silu_and_round.default, gate_up)
            return _call(graph, getitem, fused, 0), _call(graph, getitem, fused, 1)
    norm = _norm_of(source)
    return None if norm is None else _round_norm(graph, norm)


def _round_norm(graph: fx.Graph, norm: Norm) -> tuple[fx.Node, fx.Node]:
    """Put the kernel where h is made, which comes from it, too."""
    x, residual = norm.added or (norm.h, None)
    keeps = not all(_is_for_codes(user) for user in norm.node.users)
    with graph.inserting_before(norm.h if residual is not None else norm.node):
        fused = _call(graph, scalegate.norm_and_round.default, x, residual, norm.weight, norm.eps, keeps)
        h, y, codes, scales = (_call(graph, getitem, fused, index) for index in range(4))
    if residual is not None:
        norm.h.replace_all_uses_with(h)
    if keeps:
        norm.node.replace_all_uses_with(y, delete_user_cb=lambda user: not _is_for_codes(user))
    return codes, scales


def _is_for_codes(node: fx.Node) -> bool:
    """Say whether only products that take codes use a node."""
    if node.target in VIEWS:
        return all(_is_for_codes(user) for user in node.users)
    return _takes_codes(node)


def _takes_codes(node: Any) -> bool:
    """Say whether a node only needs the codes and scales of its first argument."""
    if node.target == scalegate.round_rows.default:
        return True
    is_product = node.target == scalegate.packed_matmul.default
    return is_product and rounded_inputs.takes_rounded(*node.args[2:4])


def _silu_of(node: fx.Node) -> fx.Node | None:
    """Return gate_up [..., 2K] if the node is SiLU of its first half times its second."""
    for silu, up in _factors(node):
        parts = _match(silu, prims.convert_element_type.default)
        quotient = _match(parts[0], aten.div.Tensor) if parts else None
        if not quotient:
            continue
        wide, one_and_exp = quotient
        exp = _match(one_and_exp, aten.add.Tensor)
        negative = _match(exp[0], aten.exp.default) if exp and exp[1] == 1 else None
        minus = _match(negative[0], aten.neg.default) if negative else None
        gate = _match(wide, prims.convert_element_type.default)
        if not minus or minus[0] is not wide or not gate or gate[1] != torch.float32:
            continue
        return _halves(gate[0], up, node.meta["val"].shape[-1])
    return None


def _halves(first: Any, second: Any, columns: int) -> fx.Node | None:
    """Return the tensor whose first and second halves along its last dimension these are."""
    parts = [_match(part, aten.slice.Tensor) for part in (first, second)]
    if not all(parts) or parts[0][0] is not parts[1][0]:
        return None
    whole = parts[0][0]
    shape = whole.meta["val"].shape
    last = (len(shape) - 1, -1)
    if shape[-1] != 2 * columns or any(part[1] not in last or len(part) != 4 for part in parts):
        return None
    begins = parts[0][2:] == (0, columns) and parts[1][2] == columns and parts[1][3] >= 2 * columns
    return whole if begins else None


def _norm_of(node: fx.Node) -> Norm | None:
    for normed, weight in _factors(node):
        narrow = _match(normed, prims.convert_element_type.default)
        if not narrow or narrow[1] != node.meta["val"].dtype or not _is_weight(weight, node):
            continue
        for wide, factor in _factors(narrow[0]):
            root = _match(factor, aten.rsqrt.default)
            with_eps: Any = _match(root[0], aten.add.Tensor) if root else None
            mean = _match(with_eps[0], aten.mean.dim) if with_eps else None
            square = _match(mean[0], aten.pow.Tensor_Scalar) if mean and mean[1:] == ([-1], True) else None
            h = _match(wide, prims.convert_element_type.default)
            if not square or square != (wide, 2) or not isinstance(with_eps[1], float):
                continue
            if h and h[1] == torch.float32 and h[0].meta["val"].dtype == node.meta["val"].dtype:
                return Norm(node, h[0], _added(h[0], weight), weight, with_eps[1])
    return None


def _is_weight(weight: Any, node: fx.Node) -> bool:
    value, y = getattr(weight, "meta", {}).get("val"), node.meta["val"]
    return isinstance(value, Tensor) and tuple(value.shape) == (y.shape[-1],) and value.dtype == y.dtype


def _added(h: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the two parts of h, if it is a sum before which the norm's weight is there, too."""
    parts = _match(h, aten.add.Tensor)
    if not parts or weight.op != "placeholder" or h.kwargs:
        return None
    values = [getattr(part, "meta", {}).get("val") for part in parts]
    whole = h.meta["val"]
    alike = all(isinstance(v, Tensor) and v.dtype == whole.dtype and v.shape == whole.shape for v in values)
    return (parts[0], parts[1]) if alike else None


def _factors(node: Any) -> list[tuple[Any, Any]]:
    """Return what a multiplication multiplies, in both orders."""
    factors = _match(node, aten.mul.Tensor)
    return [factors, factors[::-1]] if factors else []


def _match(node: Any, target: Callable) -> Any:
    """Return a node's arguments if it calls `target`, otherwise None."""
    return node.args if isinstance(node, fx.Node) and node.target == target else None


def _unviewed(node: Any) -> fx.Node:
    while node.target in VIEWS and node.meta["val"].shape[-1] == node.args[0].meta["val"].shape[-1]:
        node = node.args[0]
    return node


def _call(graph: fx.Graph, target: Callable, *args: Any) -> fx.Node:
    """Add a call, with what it returns described."""
    node = graph.call_function(target, args)
    values = map_arg(args, lambda each: each.meta["val"])
    with detect_fake_mode(values) or nullcontext():
        node.meta["val"] = target(*values)
    return node
