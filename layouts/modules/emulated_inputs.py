"""Which products of a model emulate their format: inputs are rounded to the format, and multiplied in 16 or
32 bits.

An emulated product has the format's results. An emulated product's speed is not that of hardware that
multiplies the format.
"""

from collections import Counter

from torch import nn

from ..formats.input_format import InputFormat, dynamic_input
from ..packing.all_layouts import LAYOUTS
from ..packing.layout import PackedWeight, emulates_inputs
from .experts import PackedExperts
from .linear import QuantizedLinear


def emulated_inputs(model: nn.Module) -> dict[tuple[str, str], int]:
    """Return how many products of `model` emulate a format of inputs, by the format's label and the hardware
    that multiplies it.
    """
    found: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        for weight, stated in _products(module):
            rounding = stated or dynamic_input(weight.spec)
            if rounding is not None and emulates_inputs(LAYOUTS[weight.layout]):
                found[rounding.label, rounding.hardware] += 1
    return dict(found)


def _products(module: nn.Module) -> list[tuple[PackedWeight, InputFormat | None]]:
    """Yield the packed weights of one module, each with the input format that the checkpoint states for it,
    if any.
    """
    if isinstance(module, QuantizedLinear):
        return [(module.packed, module.input_format)]
    if isinstance(module, PackedExperts):
        return [(weight, module.input_formats.get(name)) for name, weight in module.packed.items()]
    return []
