"""Packs a model's unquantized linear layers in batch-invariant layouts.

Not for quantized weights, which are packed while they are loaded.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from ...base.batch_invariance import BatchInvariance
from ..formats.unquantized import Unquantized, UnquantizedWeight
from ..modules.linear import QuantizedLinear
from ..packing.all_layouts import LAYOUTS
from ..packing.layout import Layout, Problem
from .choose import default_layout


@torch.no_grad()
def pack_linears(model: nn.Module, batch_invariance: BatchInvariance) -> int:
    """Replace every plain `nn.Linear` without copying its weight; returns how many products were replaced.

    Merged layers still share one product.
    """
    packed: dict[nn.Linear, QuantizedLinear] = {}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                if child not in packed:
                    packed[child] = _packed(child, batch_invariance)
                parent.add_module(name, packed[child])
    return len(packed)


def _packed(linear: nn.Linear, batch_invariance: BatchInvariance) -> QuantizedLinear:
    weight = UnquantizedWeight(Unquantized(), linear.weight.data)
    dense = Problem.of(weight, linear.weight.dtype, linear.weight.device)
    problem = replace(dense, batch_invariance=batch_invariance)
    layout = cast(Layout, LAYOUTS[default_layout(problem)])
    bias = None if linear.bias is None else linear.bias.data
    return QuantizedLinear(layout.pack(weight, linear.weight.dtype), bias)
