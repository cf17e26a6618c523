"""Whether transformers itself loads a quantized checkpoint, decided from headers and its own model classes.

If transformers has no rule that stacks single experts, it fills them with random numbers; only a log line
says so. `validation/also_load.py` checks whether the loaded weights are right: it compares logits, if
transformers can load the checkpoint.
"""

from collections.abc import Collection, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

from ..checkpoints.checkpoint import Checkpoint
from ..conventions.all_conventions import convention_of
from ..conventions.compressed_tensors.scheme import METHOD as COMPRESSED_TENSORS
from ..conventions.convention import StackingConvention
from .skeleton import meta_model
from .weight_map import Assignment, map_weights

WEIGHT = ".weight"
ZERO_POINT = ".weight_zero_point"


def why_transformers_fails(checkpoint: Checkpoint) -> str | None:
    """Return why transformers does not load the checkpoint with the library of its convention; None if it
    does.
    """
    convention = convention_of(checkpoint)
    if isinstance(convention, StackingConvention):
        return None  # its experts lie as transformers' own class has them
    stored = convention.modules(checkpoint)
    quantized = {f"{module}{WEIGHT}": weight for module, weight in stored.items() if weight.is_quantized}
    if not quantized:
        return None
    parts = {name for weight in quantized.values() for name in weight.tensors}
    model = meta_model(checkpoint, torch.bfloat16)
    mapped = map_weights(model, [*quantized, *(name for name in checkpoint.tensors if name not in parts)])
    method = str((checkpoint.quantization_config or {}).get("quant_method"))
    if any(a.is_stacked and not _holds_single_experts(model, a, method) for a in mapped.assignments):
        return (
            f"it has no rule that stacks single experts for {type(model).__name__}, and fills its experts "
            "with random numbers"
        )
    if method != COMPRESSED_TENSORS:
        return None
    zero_points = {f"{name.removesuffix(ZERO_POINT)}{WEIGHT}" for name in parts if name.endswith(ZERO_POINT)}
    for assignment in mapped.assignments:
        reason = _why_not_converted(assignment, quantized.keys(), zero_points)
        if reason is not None:
            return reason
    packed = [a.target for a in mapped.assignments if a.names[0] in quantized]
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    shared = [target for target in packed if target in tied]
    if shared:
        return f"it ties {shared[0]}, which a packed layer does not have"
    if not _initializes(model, packed):
        return f"its {type(model).__name__} initializes weights that a packed layer does not have"
    return None


def _holds_single_experts(model: PreTrainedModel, assignment: Assignment, method: str) -> bool:
    """Say whether transformers replaces the module of stacked experts by single experts."""
    owner = model.get_submodule(assignment.target.rpartition(".")[0])
    return method == COMPRESSED_TENSORS and type(owner).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION


def _why_not_converted(
    assignment: Assignment, quantized: Collection[str], zero_points: Collection[str]
) -> str | None:
    """Return why a rule of transformers that makes a parameter from several tensors fails: with
    compressed-tensors it treats every weight as a packed expert's, symmetric ones included."""
    names = assignment.names
    packed = [name for name in names if name in quantized]
    if assignment.converter is None or not (packed or _only_weights(assignment.converter.source_patterns)):
        return None
    if len(packed) < len(names):
        plain = next(name for name in names if name not in quantized)
        return f"its rule for {plain} takes packed experts alone"
    if assignment.expert_parts() is None:
        return f"its rule for {names[0]} takes no packed weights"
    if any(name in zero_points for name in names):
        return "it reads no zero points of packed experts"
    return None


def _only_weights(patterns: Sequence[str]) -> bool:
    return all(pattern.rstrip("$").endswith(WEIGHT) for pattern in patterns)


def _initializes(model: PreTrainedModel, packed: Sequence[str]) -> bool:
    """Say whether the class initializes a model whose packed layers have no `weight`, as it does before it
    loads one. Takes these weights away."""
    for target in packed:
        owner = model.get_submodule(target.rpartition(".")[0])
        if isinstance(owner, nn.Linear):
            owner._parameters.pop("weight", None)
    try:
        with torch.no_grad():
            model.initialize_weights()
    except AttributeError as error:
        if "'weight'" not in str(error):
            raise
        return False
    return True
