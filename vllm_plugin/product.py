"""The product by a packed weight, as an op of vLLM's graphs; and how a layer of vLLM holds that weight.

The op's arguments are tensors and one text, so that a graph that was traced in one process is also correct in
another process.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, library, nn

from ..kernels.hopper.packed_operand import PackedOperand
from ..layouts.formats.weight_format import spec_from_json, spec_to_json
from ..layouts.packing.hopper import HopperLayout
from ..layouts.packing.layout import PackedWeight
from .choice import LAYOUTS
from .warm_up import warm_up_pending

NAMESPACE = "scalegate_kernels"
BUFFER = "scalegate_{}"
OPERAND = "scalegate_operand"
"""The attribute of a weight's first tensor that holds its `Operand`."""
_LIBRARY = library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class Kind:
    """A packed weight without its tensors, as text can describe it."""

    layout: HopperLayout
    template: PackedWeight
    names: tuple[str, ...]

    def with_tensors(self, tensors: list[Tensor]) -> PackedWeight:
        kind = self.template
        by_name = dict(zip(self.names, tensors, strict=True))
        return PackedWeight(kind.layout, kind.spec, kind.shape, kind.dtype, by_name, kind.attributes)


def text_of(packed: PackedWeight) -> str:
    """Return a packed weight as text, without its tensors; `kind_of` reads the text."""
    fields = {
        "layout": packed.layout,
        "spec": spec_to_json(packed.spec),
        "shape": packed.shape,
        "dtype": str(packed.dtype).removeprefix("torch."),
        "attributes": dict(packed.attributes),
        "tensors": list(packed.tensors),
    }
    return json.dumps(fields)


@lru_cache(maxsize=4096)
def kind_of(text: str) -> Kind:
    fields = json.loads(text)
    template = PackedWeight(
        layout=fields["layout"],
        spec=spec_from_json(fields["spec"]),
        shape=tuple(fields["shape"]),
        dtype=getattr(torch, fields["dtype"]),
        tensors={},
        attributes=fields["attributes"],
    )
    return Kind(LAYOUTS[template.layout], template, tuple(fields["tensors"]))


@dataclass(frozen=True)
class Operand:
    """A packed weight as the kernels take it, which its first tensor remembers."""

    kind: str
    layout: HopperLayout
    operand: PackedOperand
    n: int


def operand_of(tensors: list[Tensor], kind: str) -> Operand:
    """Return the operand, which is made once for each weight: in prompts that no graph covers, Python's time
    counts.
    """
    first = tensors[0]
    operand = getattr(first, OPERAND, None)
    if operand is None or operand.kind != kind:
        warm_up_pending()
        known = kind_of(kind)
        # Of other tensors in the same memory, so that what `first` remembers does not hold `first` itself.
        packed = known.with_tensors([tensor.detach() for tensor in tensors])
        operand = Operand(kind, known.layout, known.layout.packing.operand(packed), packed.shape[0])
        setattr(first, OPERAND, operand)
    return operand


def _matmul(x: Tensor, tensors: list[Tensor], kind: str) -> Tensor:
    operand = operand_of(tensors, kind)
    return operand.layout.multiply(x, operand.operand, operand.n)


def _shape_of_matmul(x: Tensor, tensors: list[Tensor], kind: str) -> Tensor:
    return x.new_empty(x.shape[0], kind_of(kind).template.shape[0])


# The op writes to scratch among the tensors, and restores it before it ends. Defined without
# `library.custom_op`, whose checks would take longer than a small product in prompts that no graph covers.
_LIBRARY.define("matmul(Tensor x, Tensor[] tensors, str kind) -> Tensor")
_LIBRARY.impl("matmul", _matmul, "CompositeExplicitAutograd")
library.register_fake(f"{NAMESPACE}::matmul", _shape_of_matmul, lib=_LIBRARY)


def attach(layer: Any, packed: PackedWeight) -> None:
    """Give `layer` the packed weight: its tensors as buffers, and the text of its kind."""
    for name, tensor in packed.tensors.items():
        layer.register_buffer(BUFFER.format(name), tensor, persistent=False)
    layer.scalegate_buffers = tuple(BUFFER.format(name) for name in packed.tensors)
    layer.scalegate_kind = text_of(packed)


def multiply(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x @ W.T + bias` with the weight that was attached; x [..., K] gives [..., N].

    Dynamo traces this function, so it looks nothing up.
    """
    tensors = [getattr(layer, name) for name in layer.scalegate_buffers]
    rows = x.reshape(-1, x.shape[-1])
    y = torch.ops.scalegate_kernels.matmul(rows, tensors, layer.scalegate_kind)
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], y.shape[-1])


def empty(*parameters: nn.Parameter | None) -> None:
    """Free what was packed. Empty the layer's parameters. They stay in the layer, since vLLM asks them for
    their device.
    """
    for parameter in parameters:
        if parameter is not None:
            parameter.data = parameter.data.new_empty(0)
