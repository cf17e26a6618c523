"""A checkpoint's linear layers in INT4, each rounded when it is loaded: a model that generates text then
takes a third of its memory. No artifact is made from the rounded weights, and nothing is stored.
"""

from functools import partial

import torch

from ....layouts.formats.int4 import COMMON_GROUPS, Int4
from ....layouts.formats.weight_format import Weight
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.default_dtype import default_dtype
from ...conventions.convention import StoredWeight
from ...conventions.declared import stored_weights
from ...machine.malloc_trim import return_freed_memory
from ...model_loader.linear_weights import LINEAR, WEIGHT, LinearWeight, find_linear_weights
from ..shards.weight_tensors import WeightQuantizer


def rounded_weights(checkpoint: Checkpoint, device: torch.device) -> dict[str, StoredWeight]:
    """Return replacements for the linear layers' weights, by module; a weight that is not a tensor [N, K] by
    itself is left out.

    device: where the weights are rounded
    """
    stored = stored_weights(checkpoint)
    quantizer = WeightQuantizer(default_dtype(checkpoint), device)
    rounded = {}
    for tensor, parts in find_linear_weights(checkpoint).linears.items():
        linear, module = parts[0], tensor.removesuffix(WEIGHT)
        spec = _spec(linear)
        if len(parts) > 1 or linear.role != LINEAR or linear.transposed or module == tensor or spec is None:
            continue
        tensors = stored[module].tensors if module in stored else (tensor,)
        read = partial(_rounded, checkpoint, linear, spec, quantizer)
        rounded[module] = StoredWeight(module, (linear.n, linear.k), spec, tensors, read)
    return rounded


def _spec(linear: LinearWeight) -> Int4 | None:
    sizes = (Int4(size) for size in COMMON_GROUPS)
    return next((spec for spec in sizes if spec.refuses(linear.n, linear.k) is None), None)


def _rounded(checkpoint: Checkpoint, linear: LinearWeight, spec: Int4, quantizer: WeightQuantizer) -> Weight:
    weight = quantizer.quantize(checkpoint, linear, spec, {}).weight
    return_freed_memory()
    return weight
