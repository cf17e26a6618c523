"""Which weight of a checkpoint goes where in the transformers model: renamings, merges and splits included.

transformers keeps the rules for renaming, merging and splitting (its conversion mapping); this file applies
the rules to names. It reads no data.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ..checkpoints.checkpoint import NO_WEIGHT
from .prediction_heads import is_prediction_head

OUTSIDE = re.compile(
    r"(^|\.)\w*(vision|visual|audio|speech|image|multi_modal|projector|connector|resampler|talker|2wav)\w*(\.|$)"
)
"""Names of modules beside the language model: towers, and the projectors of their outputs."""
TEXT_CONFIG = "text_config"
"""transformers' name for the config of a language model that may be part of a larger one: its checkpoint may
have towers."""
EXPERT_SLICE = re.compile(r"^(?P<experts>.+)\.(?P<index>\d+)\.(?P<name>\w+)\.(?P<kind>weight|bias)$")
GATE, UP, GATE_UP = "gate_proj", "up_proj", "gate_up_proj"
PROJECTIONS = (GATE, UP, GATE_UP, "down_proj")
"""An expert's weights by the names that engines and transformers give them."""


HALVES, INTERLEAVED = "halves", "interleaved"
GATE_FIRST = ("Llama4TextExperts", "Step3p7Experts")
"""Experts outside transformers' experts interface whose `forward` uses the first half as the gate."""


@dataclass
class Assignment:
    """The weights that make one parameter (or, through a converter, several) of the model.

    target:      the parameter's name; the first one of several
    converter:   transformers' rule, None if the weight is only renamed, or single experts are stacked by
                 their names alone
    sources:     weight names in the checkpoint by the converter's source pattern, experts in order; without a
                 converter by the name of the projection
    interleaved: whether the rows of an expert's projections alternate in the parameter
    """

    target: str
    converter: WeightConverter | None = None
    sources: dict[str, list[str]] = field(default_factory=dict)
    interleaved: bool = False

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    @property
    def targets(self) -> list[str]:
        """Return all parameters that a converter makes, named after the first one."""
        patterns = self.converter.target_patterns if self.converter else []
        if len(patterns) < 2:
            return [self.target]
        return [self.target.replace(patterns[0], pattern) for pattern in patterns]

    @property
    def is_stacked(self) -> bool:
        """Say whether the names of single experts' tensors alone decide how they are stacked."""
        return self.converter is None and bool(self.sources) and all(n in PROJECTIONS for n in self.sources)

    def expert_parts(self) -> list[list[str]] | None:
        """Return, for each expert, the weights that are stacked in its slice; None for anything else."""
        operations = self.converter.operations if self.converter else []
        merges = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        rest_stacks_rows = all(isinstance(op, Concatenate) and op.dim == 1 for op in operations[1:])
        if self.is_stacked:
            columns = [self.sources[name] for name in PROJECTIONS if name in self.sources]
        elif self.converter is None or not merges or not rest_stacks_rows:
            return None
        else:
            columns = [self.sources.get(pattern, []) for pattern in self.converter.source_patterns]
        if len({len(column) for column in columns}) != 1:
            return None
        return [list(parts) for parts in zip(*columns, strict=True)]


@dataclass(frozen=True)
class WeightMap:
    assignments: list[Assignment]
    unexpected: list[str]
    """Weights of the checkpoint that the model has no place for."""
    missing: list[str]
    """Parameters of the model that nothing in the checkpoint fills, directly or by being tied."""


def map_weights(model: PreTrainedModel, names: Iterable[str]) -> WeightMap:
    """Assign every weight name of a checkpoint to a parameter of the model."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, modules = model.state_dict(), dict(model.named_modules(remove_duplicate=False))
    prefix = model.base_model_prefix
    ignorable = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    assignments: dict[str, Assignment] = {}
    unexpected = []
    for name in sorted(names, key=natural_order):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        stacked = _stacked(renamed, state, modules)
        if renamed in state and pattern is not None:
            if renamed not in assignments:
                assignments[renamed] = Assignment(renamed, deepcopy(by_pattern[pattern]))
            assignments[renamed].sources.setdefault(pattern, []).append(name)
        elif renamed in state:
            assignments[renamed] = Assignment(renamed, None, {name: [name]})
        elif stacked is not None:
            fused, projection, interleaved = stacked
            assignment = assignments.setdefault(fused, Assignment(fused, interleaved=interleaved))
            assignment.sources.setdefault(projection, []).append(name)
        elif not NO_WEIGHT.search(name) and not any(pattern.search(renamed) for pattern in ignorable):
            unexpected.append(name)
    text = model.config.get_text_config(decoder=True).to_dict()
    unexpected = [name for name in unexpected if not is_prediction_head(name, text)]
    if model.config.base_config_key == TEXT_CONFIG:
        unexpected = [name for name in unexpected if not OUTSIDE.search(name)]
    found = list(assignments.values())
    return WeightMap(found, unexpected, _missing(model, found))


def _stacked(
    name: str, state: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> tuple[str, str, bool] | None:
    """Return, for models without a rule for it, the parameter in which the weights or biases of single
    experts are stacked; the projection of this one; and whether gate and up are interleaved in the parameter.
    """
    expert = EXPERT_SLICE.match(name)
    if expert is None or expert["name"] not in PROJECTIONS:
        return None
    suffix = "_bias" if expert["kind"] == "bias" else ""
    parameter = f"{expert['experts']}.{expert['name']}{suffix}"
    if parameter in state:
        return parameter, expert["name"], False
    parameter = f"{expert['experts']}.{GATE_UP}{suffix}"
    order = gate_up_order(modules[expert["experts"]]) if parameter in state else None
    if expert["name"] not in (GATE, UP) or order is None:
        return None
    return parameter, expert["name"], order == INTERLEAVED


def gate_up_order(experts: nn.Module) -> str | None:
    """Return the order of gate and up rows in an experts module's `gate_up_proj`; None if it is not known."""
    if type(experts).__name__ in GATE_FIRST:
        return HALVES
    concatenated = getattr(experts, "is_concatenated", None)
    if concatenated is None or not getattr(experts, "has_gate", False):
        return None
    return HALVES if concatenated else INTERLEAVED


def foreign_roots(model: PreTrainedModel, names: Iterable[str]) -> list[str] | None:
    """Return the prefixes of tensor names that another program has added, such as a trainer's `v_head`.

    Return None if one of `names` begins like a module of the model. If none does, the config belongs to
    another model.
    """
    roots = list(dict.fromkeys(name.split(".")[0] for name in names))
    known = {part for name, _ in model.named_modules() for part in name.split(".")}
    return None if known.intersection(roots) else roots


def _missing(model: PreTrainedModel, assignments: list[Assignment]) -> list[str]:
    """Return the parameters that no assignment fills. If a converter makes several parameters, their names
    are not known beforehand."""
    if any(a.converter and len(a.converter.target_patterns) > 1 for a in assignments):
        return []
    filled = {assignment.target for assignment in assignments}
    for target, source in model.all_tied_weights_keys.items():
        if target in filled or source in filled:
            filled |= {target, source}
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    names = (name for name in model.state_dict() if name not in filled)
    return [name for name in names if not any(pattern.search(name) for pattern in optional)]


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts expert 2 before expert 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
