"""Which weight of a checkpoint goes where in the transformers model: renamings, merges and splits included.

transformers keeps these rules (its conversion mapping); this file applies them to names. It reads no data.
"""

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from .prediction_heads import is_prediction_head

# Not weights of the model: old rotary caches, and scales for an FP8 KV cache, which `kv_cache.py` reads.
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|\.(k|v|q|prob)_scale$|\.[kv]_proj\.output_scale$")
OUTSIDE = re.compile(
    r"(^|\.)\w*(vision|visual|audio|speech|image|multi_modal|projector|connector|resampler|talker|2wav)\w*(\.|$)"
)
"""Names of what lies beside the language model: towers, and what projects their outputs."""
TEXT_CONFIG = "text_config"
"""transformers' name for the config of a language model that may be part of a larger one: its checkpoint may
have towers."""
EXPERT_SLICE = re.compile(r"^(?P<experts>.+)\.(?P<index>\d+)\.(?P<name>\w+)\.weight$")


@dataclass
class Assignment:
    """The weights that make one parameter (or, through a converter, several) of the model.

    target:    the parameter's name; the first one of several
    converter: transformers' rule, None where the weight is only renamed
    sources:   weight names in the checkpoint by the converter's source pattern, experts in order
    """

    target: str
    converter: WeightConverter | None = None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    @property
    def targets(self) -> list[str]:
        """All parameters that it makes: a converter names them by what stands in the first one's place."""
        patterns = self.converter.target_patterns if self.converter else []
        if len(patterns) < 2:
            return [self.target]
        return [self.target.replace(patterns[0], pattern) for pattern in patterns]

    def expert_parts(self) -> list[list[str]] | None:
        """For each expert, the weights that lie one above the other in its slice; None for anything else."""
        operations = self.converter.operations if self.converter else []
        merges = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        rest_stacks_rows = all(isinstance(op, Concatenate) and op.dim == 1 for op in operations[1:])
        if self.converter is None and list(self.sources) == [EXPERT_SLICE.pattern]:
            return [[name] for name in self.sources[EXPERT_SLICE.pattern]]
        if self.converter is None or not merges or not rest_stacks_rows:
            return None
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
    state = model.state_dict()
    prefix = model.base_model_prefix
    ignorable = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    assignments: dict[str, Assignment] = {}
    unexpected = []
    for name in sorted(names, key=natural_order):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        expert = EXPERT_SLICE.match(renamed)
        if renamed in state and pattern is not None:
            rule = by_pattern[pattern]
            assignment = assignments.setdefault(renamed, Assignment(renamed, deepcopy(rule)))
            assignment.sources.setdefault(pattern, []).append(name)
        elif renamed in state:
            assignments[renamed] = Assignment(renamed, None, {name: [name]})
        elif expert and f"{expert['experts']}.{expert['name']}" in state:
            fused = f"{expert['experts']}.{expert['name']}"
            assignment = assignments.setdefault(fused, Assignment(fused))
            assignment.sources.setdefault(EXPERT_SLICE.pattern, []).append(name)
        elif not IGNORED.search(name) and not any(pattern.search(renamed) for pattern in ignorable):
            unexpected.append(name)
    text = model.config.get_text_config(decoder=True).to_dict()
    unexpected = [name for name in unexpected if not is_prediction_head(name, text)]
    if model.config.base_config_key == TEXT_CONFIG:
        unexpected = [name for name in unexpected if not OUTSIDE.search(name)]
    found = list(assignments.values())
    return WeightMap(found, unexpected, _missing(model, found))


def foreign_roots(model: PreTrainedModel, names: Iterable[str]) -> list[str] | None:
    """What the names of tensors begin with that another program has added, such as a trainer's `v_head`.

    None where one of `names` begins as a module of the model does: then the config is of another model.
    """
    roots = list(dict.fromkeys(name.split(".")[0] for name in names))
    known = {part for name, _ in model.named_modules() for part in name.split(".")}
    return None if known.intersection(roots) else roots


def _missing(model: PreTrainedModel, assignments: list[Assignment]) -> list[str]:
    """What no assignment fills. Nothing is known beforehand where a converter makes several parameters."""
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
    """A sort key that puts expert 2 before expert 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
