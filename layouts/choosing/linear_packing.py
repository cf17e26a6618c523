"""Plain linear layers of a model put into a layout that keeps bits, for batch-invariant serving.

Not for quantized weights, which are packed as they are loaded.
"""

from typing import cast

import torch
from torch import nn

from ...base.batch_invariance import Numerics
from ..formats.unquantized import Unquantized, UnquantizedWeight
from ..modules.linear import QuantizedLinear
from ..packing.all_layouts import LAYOUTS
from ..packing.layout import Layout, Problem
from .choose import default_layout


@torch.no_grad()
def pack_linears(model: nn.Module, numerics: Numerics) -> int:
    """Replace every plain `nn.Linear`, its weight not copied; the number of products replaced.

    Merged layers share one product, and go on sharing it.
    """
    packed: dict[nn.Linear, QuantizedLinear] = {}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                if child not in packed:
                    packed[child] = _packed(child, numerics)
                parent.add_module(name, packed[child])
    return len(packed)


def _packed(linear: nn.Linear, numerics: Numerics) -> QuantizedLinear:
    weight = UnquantizedWeight(Unquantized(), linear.weight.data)
    problem = Problem(
        weight.spec, *weight.shape, linear.weight.dtype, linear.weight.device, numerics=numerics
    )
    layout = cast(Layout, LAYOUTS[default_layout(problem)])
    bias = None if linear.bias is None else linear.bias.data
    return QuantizedLinear(layout.pack(weight, linear.weight.dtype), bias)
