"""Tensors that merged weights share: the groups of weights that share them, and the pass that computes them.

A format names such tensors in `shared`; its quantizer computes them. Shared tensors must be known before the
first weight is quantized, so weights are read twice; measurements are kept in the work record.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ....layouts.formats.weight_format import WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ...model_loader.linear_weights import LinearWeight
from ...model_loader.merge_groups import merge_groups
from ..quantizers.all_quantizers import QUANTIZERS
from ..quantizers.quantizer import SharingQuantizer
from .progress import byte_bar
from .ranks import Ranks
from .tasks import WeightTask, source_bytes
from .weight_tensors import WeightQuantizer
from .work_record import WorkRecord

LOADED_AS_ONE = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Names that engines load as one weight, for models whose skeleton cannot be asked."""

Shared = Mapping[str, Mapping[str, Tensor]]
"""For each module, the tensors that it shares with others."""


def find_shared_tensors(
    checkpoint: Checkpoint,
    shards: Mapping[str, Sequence[WeightTask]],
    quantizer: WeightQuantizer,
    record: WorkRecord,
    ranks: Ranks,
    progress: bool,
) -> Shared:
    """Return the shared tensors of every weight whose format has any; if no format has any, nothing is read
    and the result is empty.

    shards: measurements are kept in the record after each shard
    """
    sharing = {
        name: [task for task in tasks if task.linear is not None and task.spec.shared]
        for name, tasks in shards.items()
    }
    every = [task for tasks in sharing.values() for task in tasks]
    if not every:
        return {}
    _measure(checkpoint, sharing, quantizer, record, ranks, progress)
    record.reload()
    found: dict[str, Mapping[str, Tensor]] = {}
    for spec, modules in _groups(checkpoint, every):
        largest = max(record.measured[module] for module in modules)
        tensors = _sharing_quantizer(spec).shared_tensors(spec, largest)
        found |= dict.fromkeys(modules, tensors)
    return found


def shared_in(
    checkpoint: Checkpoint,
    linears: Sequence[LinearWeight],
    leaders: Mapping[str, str],
    spec: WeightFormat,
    quantizer: WeightQuantizer,
) -> Shared:
    """Return the shared tensors of `linears`, all in `spec`, read here; leaders: from `merged_under`"""
    if not spec.shared:
        return {}
    sharer = _sharing_quantizer(spec)
    largest: dict[str, float] = {}
    for linear in linears:
        leader = leaders[linear.module]
        largest[leader] = max(largest.get(leader, 0.0), quantizer.measure(checkpoint, linear, sharer))
    tensors = {leader: sharer.shared_tensors(spec, value) for leader, value in largest.items()}
    return {linear.module: tensors[leaders[linear.module]] for linear in linears}


def _measure(
    checkpoint: Checkpoint,
    sharing: Mapping[str, Sequence[WeightTask]],
    quantizer: WeightQuantizer,
    record: WorkRecord,
    ranks: Ranks,
    progress: bool,
) -> None:
    def cost(name: str) -> int:
        return sum(source_bytes(checkpoint, task) for task in sharing[name])

    with byte_bar(sum(map(cost, sharing)), "measuring", ranks, progress) as read:
        for name in ranks.deal("measuring", list(sharing), cost):
            measured: dict[str, float] = {}
            for task in sharing[name]:
                linear = task.linear
                if linear is not None and linear.module not in record.measured:
                    sharer = _sharing_quantizer(task.spec)
                    measured[linear.module] = quantizer.measure(checkpoint, linear, sharer)
                read(source_bytes(checkpoint, task))
            if measured:
                record.keep_measured(name, measured)


def _groups(checkpoint: Checkpoint, sharing: Sequence[WeightTask]) -> list[tuple[WeightFormat, list[str]]]:
    """Return the modules that share, with their format; a module that shares with no other is its own
    group.
    """
    leaders = merged_under(checkpoint, [task.linear for task in sharing if task.linear is not None])
    groups: dict[tuple[WeightFormat, str], list[str]] = {}
    for task in sharing:
        if task.linear is not None:
            leader = leaders[task.linear.module]
            groups.setdefault((task.spec, leader), []).append(task.linear.module)
    return [(spec, modules) for (spec, _), modules in groups.items()]


def merged_under(checkpoint: Checkpoint, linears: Sequence[LinearWeight]) -> dict[str, str]:
    """Return, for each module, the place in the model of the first weight that is merged with it, or its own
    place.
    """
    merged = merge_groups(checkpoint, torch.bfloat16)
    leaders = {place: places[0] for places in merged for place in places}
    return {
        linear.module: (leaders.get(linear.place) if leaders else _by_name(linear)) or linear.place
        for linear in linears
    }


def _by_name(linear: LinearWeight) -> str | None:
    parent, _, leaf = linear.place.rpartition(".")
    first = next((names[0] for names in LOADED_AS_ONE if leaf in names), None)
    return None if first is None else f"{parent}.{first}"


def _sharing_quantizer(spec: WeightFormat) -> SharingQuantizer:
    quantizer = QUANTIZERS[spec.name]
    if not isinstance(quantizer, SharingQuantizer):
        raise TypeError(f"{spec.name} shares {', '.join(spec.shared)}, and its quantizer cannot find them")
    return quantizer
