"""Finds products of a model that are not batch-invariant, so that batch-invariant serving can refuse them.

A GPU's libraries choose an algorithm by the number of rows. Linear layers and experts use batch-invariant
layouts, and compiled layers use our product for routers; all other products are found by running the model.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker
from transformers import PreTrainedModel

from ...layouts.modules.experts import PackedExperts
from ...layouts.modules.linear import QuantizedLinear
from .attention import attention_layers
from .compiling import own_product_pass
from .compiling.compiled_layers import model_layers

aten = torch.ops.aten
PRODUCTS = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.mv,
    aten.dot,
    aten.convolution,
    aten._scaled_mm,
    aten._grouped_mm,
    aten.linear,
    aten.matmul,
    aten.einsum,
    aten.scaled_dot_product_attention,
    aten.mkldnn_linear,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}


class _ProductObserver(TorchDispatchMode):
    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.found: dict[str, None] = {}
        compiled = set(model_layers(model))
        self._compiled = {name for name, module in model.named_modules() if module in compiled}
        self._in_layouts = {
            name
            for name, module in model.named_modules()
            if isinstance(module, QuantizedLinear | PackedExperts)
        }
        self.tracker = ModuleTracker()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket in PRODUCTS and not _is_exact(args):
            # The tracker begins every name with the model's class.
            parents = {name.partition(".")[2] for name in self.tracker.parents}
            if not parents & self._in_layouts and not self._gets_ours(func, args, parents):
                deepest = max(parents, key=len, default="")
                self.found[f"{deepest or 'the model'} ({func.overloadpacket.__name__})"] = None
        return func(*args, **(kwargs or {}))

    def _gets_ours(self, func: Any, args: tuple, parents: set[str]) -> bool:
        """Say whether the product is in a compiled layer, where a graph pass replaces it by ours."""
        place = own_product_pass.WEIGHT_AT.get(func.overloadpacket)
        served = place is not None and own_product_pass.serves(func.overloadpacket, args[place])
        return served and bool(parents & self._compiled)


def _is_exact(args: tuple) -> bool:
    """Say whether the product is one column times one row, as in rotary embeddings: it sums nothing."""
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    return len(tensors) >= 2 and tensors[-2].shape[-1] == 1


def other_products(model: PreTrainedModel) -> list[str]:
    """Return names such as `model.layers.0.mlp.gate (mm)`, in the order of the forward pass.

    The model must be prepared: paged attention, linear layers packed.
    """
    observer = _ProductObserver(model)
    with observer.tracker, observer:
        attention_layers(model)
    return list(observer.found)
