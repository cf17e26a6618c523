"""A recipe whose formats differ from layer to layer, chosen under a budget by what was measured.

What was measured is kept in the work folder, and later in the manifest, so that no call measures twice.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...layouts.errors import UserError
from ...layouts.files import write_json
from ...layouts.formats.weight_format import spec_from_json, spec_to_json
from ...layouts.outside_files import read_json_object
from ..artifact import MANIFEST_NAME
from ..checkpoints.checkpoint import Checkpoint
from ..recipe import Recipe, Rule
from .allocation import Allocation, Budget, allocate
from .calibration_text import CalibrationText
from .self_calibration import beside, can_draw, drawn_sequences
from .sensitivity import TEXT_SEQUENCES, Group, measure_sensitivity, weights_to_choose_for
from .tasks import make_tasks
from .weight_tensors import WeightQuantizer
from .work_record import CALIBRATION_FOLDER

KEPT_NAME = "sensitivity.json"
KEY, GROUPS, SENSITIVITY = "key", "groups", "sensitivity"


@dataclass(frozen=True)
class MixedRecipe:
    """recipe: with a rule for every module; table: what was measured and chosen, for the manifest."""

    recipe: Recipe
    table: dict[str, Any]


def mixed_recipe(
    checkpoint: Checkpoint,
    recipe: Recipe,
    budget: Budget,
    text: CalibrationText,
    quantizer: WeightQuantizer,
    folder: Path,
    progress: bool,
) -> MixedRecipe:
    """`recipe` with the formats that buy most within `budget`; `folder` is the artifact's."""
    tasks = make_tasks(checkpoint, recipe).in_order
    nothing = UserError(f"{checkpoint.source}: the recipe {recipe.name!r} leaves no layer to choose for")
    if not weights_to_choose_for(tasks):
        raise nothing
    key = _key(checkpoint, recipe, text)
    groups = _kept(folder, key)
    if groups is None:
        work = folder / CALIBRATION_FOLDER
        work.mkdir(parents=True, exist_ok=True)
        sequences = _sequences(checkpoint, text, quantizer, work, progress)
        groups = measure_sensitivity(checkpoint, tasks, sequences, quantizer, work, progress)
        if not groups:
            raise nothing
        write_json(work / KEPT_NAME, {KEY: key, GROUPS: [group.to_json() for group in groups]})
    chosen = allocate(groups, budget)
    rules = tuple(Rule(module, spec) for module, spec in chosen.by_module().items())
    return MixedRecipe(replace(recipe, rules=(*rules, *recipe.rules)), _table(key, chosen, budget))


def _sequences(
    checkpoint: Checkpoint, text: CalibrationText, quantizer: WeightQuantizer, work: Path, progress: bool
) -> Tensor:
    """Half of them the model's own where a text is given, as in what weights are solved on."""
    device = quantizer.device
    if text.sequences is not None and not can_draw(checkpoint, device):
        return text.sequences
    count = TEXT_SEQUENCES if text.sequences is None else TEXT_SEQUENCES // 2
    kept = work / "drawn-few.safetensors"
    own = drawn_sequences(checkpoint, (count, text.shape[1]), device, kept, progress)
    return own if text.sequences is None else beside(text.sequences, own)


def _key(checkpoint: Checkpoint, recipe: Recipe, text: CalibrationText) -> str:
    """One digest of all that decides what is measured, but for the weights: their sizes stand for them."""
    files = {path.name: path.stat().st_size for path in checkpoint.shards}
    said = [checkpoint.public_name, checkpoint.revision, files, recipe.to_json(), text.parameters]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _kept(folder: Path, key: str) -> list[Group] | None:
    """What an earlier call measured for the same `key`; None where none did."""
    for path in (folder / CALIBRATION_FOLDER / KEPT_NAME, folder / MANIFEST_NAME):
        if not path.is_file():
            continue
        value = read_json_object(path)
        found = value if path.name == KEPT_NAME else value.get("quantization", {}).get(SENSITIVITY, {})
        if found.get(KEY) == key:
            return [Group.from_json(one) for one in found[GROUPS]]
    return None


def _table(key: str, chosen: Allocation, budget: Budget) -> dict[str, Any]:
    asked = {"target_bits": budget.bits, "max_kl": budget.divergence}
    return {
        KEY: key,
        **{name: value for name, value in asked.items() if value is not None},
        "bits_per_weight": round(chosen.bits, 4),
        "kl": float(f"{chosen.divergence:.4g}"),
        GROUPS: [
            group.to_json() | {"chosen": spec_to_json(spec)}
            for group, spec in zip(chosen.groups, chosen.chosen, strict=True)
        ],
    }


def table_lines(table: dict[str, Any]) -> list[str]:
    """For people: a line for each group of modules, with what it costs in each format and which it got."""
    lines = []
    for value in table[GROUPS]:
        group, chosen = Group.from_json(value), spec_from_json(value["chosen"])
        costs = "  ".join(f"{spec.key} {kl:.5f}" for spec, kl in group.divergence.items())
        more = f" and {len(group.modules) - 1} more" if len(group.modules) > 1 else ""
        lines.append(f"{group.modules[0]}{more}: KL {costs}; became {chosen.key}")
    return lines
