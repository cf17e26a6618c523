"""Finds the linear layers of a model that get the same input, so that their weights can be merged.

The model's skeleton runs on torch's meta device, where nothing is computed and no data is read.
"""

import torch
from torch import Tensor, nn

from ...base.log import logger
from ...layouts.modules.experts import is_experts
from ...layouts.modules.merged_linear import layers_with_one_input
from ...serving_check.engine.attention import attention_layers
from ..checkpoints.checkpoint import Checkpoint
from .skeleton import meta_model


def merge_groups(checkpoint: Checkpoint, dtype: torch.dtype) -> list[list[str]]:
    """Return the module names of each group, in the order of their calls; no groups if the model cannot be
    run.

    A model that the embedded engine does not serve, or that cannot run on the meta device, is left as it is:
    its layers are then measured and served one by one.
    """
    try:
        model = meta_model(checkpoint, dtype).eval()
        with torch.device("meta"):
            for module in model.modules():
                if is_experts(module):
                    module.forward = no_experts  # type: ignore[method-assign]
            return layers_with_one_input(model, lambda: attention_layers(model))
    except Exception as error:
        # Architectures fail here in their own ways, and none of them keeps a model from being loaded.
        logger.debug(f"no merged projections for {checkpoint.source}: {error}")
        return []


def no_experts(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    """Replace the experts' forward inside the `with` block: it depends on the chosen experts, which are
    unknown on the meta device.
    """
    return torch.zeros_like(hidden_states)


def merged_alike(groups: list[list[str]], kinds: dict[str, object]) -> list[list[str]]:
    """Split each group by kind; layers without a kind, and layers that are the only ones of their kind, are
    left out.
    """
    found = []
    for names in groups:
        by_kind: dict[object, list[str]] = {}
        for name in names:
            if name in kinds:
                by_kind.setdefault(kinds[name], []).append(name)
        found += [alike for alike in by_kind.values() if len(alike) > 1]
    return found


def plain_kinds(model: nn.Module) -> dict[str, object]:
    """Return, for each plain linear layer, the properties that merged layers must share: dtype, and whether
    there is a bias.
    """
    return {
        name: (module.weight.dtype, module.bias is None)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    }
